// A device that is not the CPU: torch's PrivateUse1 on host memory.
//
// It holds what a real accelerator asks of code: tensors live on a device with an index, devices don't mix, memory is
// counted, random numbers come from a generator of its own, collectives from a process group of its own. What it
// computes is what the CPU computes, bit for bit: a kernel gets the same bytes as a CPU tensor. Streams and events
// do nothing, since all work is done when a call returns.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdlib>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Storage;
using c10::Stream;
constexpr auto kSimulated = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kMostDevices = 8;

// Two devices, or those that the environment leaves visible, as the drivers of real ones have it.
DeviceIndex device_count() {
  static const DeviceIndex count = [] {
    const char* visible = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (visible == nullptr) return 2;
    std::string text(visible);
    return text.empty() ? 0 : 1 + static_cast<int>(std::count(text.begin(), text.end(), ','));
  }();
  return std::min(count, kMostDevices);
}

thread_local DeviceIndex current_index = 0;
thread_local std::array<c10::StreamId, kMostDevices> current_streams{};

void set_index(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "there is no device ", int(index), " among ", int(device_count()));
  current_index = index;
}

// Memory

struct Usage {
  std::atomic<int64_t> now{0}, peak{0};
};
std::array<Usage, kMostDevices> usage;

// Memory of a device is memory of the host, with an owner that counts it.
struct Block {
  Storage host;
  int64_t bytes;
  DeviceIndex index;
  Block(Storage storage, DeviceIndex device) : host(std::move(storage)), bytes(host.nbytes()), index(device) {
    int64_t now = usage[index].now += bytes, peak = usage[index].peak;
    while (peak < now && !usage[index].peak.compare_exchange_weak(peak, now)) {
    }
  }
  ~Block() { usage[index].now -= bytes; }
};

c10::DataPtr on_device(Storage host, DeviceIndex index) {
  void* data = host.mutable_data();
  return {data, new Block(std::move(host), index), [](void* block) { delete static_cast<Block*>(block); },
          Device(kSimulated, index)};
}

Storage host_storage(size_t bytes, c10::DataPtr data) {
  return Storage(Storage::use_byte_size_t(), bytes, std::move(data), c10::GetAllocator(c10::kCPU), /*resizable=*/true);
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    return on_device(host_storage(bytes, c10::GetAllocator(c10::kCPU)->allocate(bytes)), current_index);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes}) {
      (*bytes)[0].current = usage[index].now;
      (*bytes)[0].peak = usage[index].peak;
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex index) override { usage[index].peak = usage[index].now.load(); }
};
Memory memory;
REGISTER_ALLOCATOR(kSimulated, &memory);

Storage new_storage(Storage host, DeviceIndex index) {
  size_t bytes = host.nbytes();
  return Storage(Storage::use_byte_size_t(), bytes, on_device(std::move(host), index), &memory, /*resizable=*/true);
}

// Devices, streams, events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSimulated; }
  Device getDevice() const override { return Device(kSimulated, current_index); }
  void setDevice(Device device) const override { set_index(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current_index = device.index(); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    if (device.has_index()) set_index(device.index());
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, device, current_streams[device.index()]);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return Stream(Stream::UNSAFE, device.has_index() ? device : getDevice(), ++last);
  }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
  double elapsedTime(void*, void*, DeviceIndex) const override { return 0.0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Random numbers: those of a generator of the host that nobody else draws from.
struct Randomness final : c10::GeneratorImpl {
  at::Generator host = at::detail::createCPUGenerator();
  explicit Randomness(DeviceIndex index)
      : GeneratorImpl(Device(kSimulated, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Randomness* clone_impl() const override {
    auto* copy = new Randomness(device().index());
    copy->host = host.clone();
    return copy;
  }
};

const at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex i = 0; i < kMostDevices; ++i) made.push_back(at::make_generator<Randomness>(i));
    return made;
  }();
  return all[index < 0 ? current_index : index];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count(); }
  DeviceIndex getCurrentDevice() const override { return current_index; }
  void setCurrentDevice(DeviceIndex index) const override { set_index(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    DeviceIndex before = current_index;
    if (index >= 0) set_index(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Randomness>(index < 0 ? current_index : index);
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    DeviceIndex index = storage.device().index();
    Storage host = host_storage(bytes, c10::GetAllocator(c10::kCPU)->allocate(bytes));
    std::memcpy(host.mutable_data(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(on_device(std::move(host), index));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// Operators

at::Tensor shaped_as(at::Tensor tensor, const at::Tensor& like) {
  tensor.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return tensor;
}

at::Tensor new_tensor(Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  return shaped_as(at::detail::make_tensor<c10::TensorImpl>(std::move(storage), key, like.dtype()), like);
}

// In inference mode too, a view of a tensor that has gradients is one.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& like) {
  using c10::TensorImpl;
  Storage shared = base.storage();
  return shaped_as(
      at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, std::move(shared), base.key_set(), like.dtype()), like);
}

// The arguments of one call as the CPU may see them, and its results as the device's.
class Call {
 public:
  explicit Call(std::string name) : name_(std::move(name)) {}

  at::Tensor to_host(const at::Tensor& tensor, bool may_be_elsewhere = false) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kSimulated) {
      TORCH_CHECK(tensor.is_cpu() && (tensor.dim() == 0 || may_be_elsewhere), name_, ": Expected all tensors to be on ",
                  "the same device, but found at least two devices, ", Device(kSimulated), " and ", tensor.device());
      return tensor;
    }
    use(tensor.device());
    for (auto& [device, host] : tensors_)
      if (device.is_same(tensor)) return host;
    auto host = new_tensor(to_host(tensor.storage()), c10::DispatchKey::CPU, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) host.unsafeGetTensorImpl()->set_wrapped_number(true);
    tensors_.emplace_back(tensor, host);
    return host;
  }

  Storage to_host(const Storage& storage) {
    for (auto& [device, host] : storages_)
      if (device.is_alias_of(storage)) return host;
    auto forget = [](void* kept) { delete static_cast<Storage*>(kept); };
    c10::DataPtr data(storage.mutable_data(), new Storage(storage), forget, Device(c10::kCPU));
    storages_.emplace_back(storage, host_storage(storage.nbytes(), std::move(data)));
    return storages_.back().second;
  }

  // A tensor of the call itself, a view of one, or a new one.
  at::Tensor to_device(const at::Tensor& host) {
    if (!host.defined()) return host;
    for (auto& [device, seen] : tensors_)
      if (seen.is_same(host)) return device;
    for (auto& [device, seen] : tensors_)
      if (seen.is_alias_of(host)) return view_of(device, host);
    return new_tensor(to_device(host.storage()), c10::DispatchKey::PrivateUse1, host);
  }

  // What the call wrote to may have another size or other memory now.
  void write_back(const at::Tensor& device) {
    if (!device.defined()) return;
    TORCH_CHECK(device.device().type() == kSimulated, name_, ": can't write from ", Device(kSimulated), " to ",
                device.device());
    auto host = to_host(device);
    auto* tensor = device.unsafeGetTensorImpl();
    if (!to_host(device.storage()).is_alias_of(host.storage())) {
      tensor->set_storage_keep_dtype(to_device(host.storage()));
    } else if (host.storage().nbytes() != device.storage().nbytes()) {
      auto* memory = device.storage().unsafeGetStorageImpl();
      memory->set_nbytes(host.storage().nbytes());
      memory->set_data_ptr_noswap(on_device(host.storage(), device.device().index()));
    }
    shaped_as(device, host);
  }

  void use(Device device) {
    DeviceIndex index = device.has_index() ? device.index() : current_index;
    TORCH_CHECK(index_ < 0 || index_ == index, name_, ": Expected all tensors to be on the same device, but found at ",
                "least two devices, ", Device(kSimulated, index_), " and ", Device(kSimulated, index));
    index_ = index;
  }

  DeviceIndex index() const { return index_ < 0 ? current_index : index_; }

 private:
  Storage to_device(const Storage& host) {
    for (auto& [device, seen] : storages_)
      if (seen.is_alias_of(host)) return device;
    storages_.emplace_back(new_storage(host, index()), host);
    return storages_.back().first;
  }

  std::string name_;
  DeviceIndex index_ = -1;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
  std::vector<std::pair<Storage, Storage>> storages_;
};

bool takes_generator(const c10::Argument& argument) {
  auto optional = argument.type()->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

c10::IValue to_host(Call& call, const c10::IValue& value, const c10::Argument& argument, bool may_be_elsewhere) {
  if (value.isTensor()) return call.to_host(value.toTensor(), may_be_elsewhere);
  if (value.isTensorList()) {
    c10::List<at::Tensor> hosts;
    for (const at::Tensor& tensor : value.toTensorVector()) hosts.push_back(call.to_host(tensor, may_be_elsewhere));
    return hosts;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> hosts;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      hosts.push_back(tensor ? std::make_optional(call.to_host(*tensor, may_be_elsewhere)) : std::nullopt);
    return hosts;
  }
  if (value.isStorage()) return call.to_host(value.toStorage());
  if (value.isDevice()) {
    call.use(value.toDevice());
    return Device(c10::kCPU);
  }
  if (value.isGenerator() || (value.isNone() && takes_generator(argument))) {
    at::Generator generator = value.isNone() ? default_generator(call.index()) : value.toGenerator();
    TORCH_CHECK(generator.device().type() == kSimulated, "Expected a generator of the device, found one of ",
                generator.device());
    return static_cast<Randomness*>(generator.unsafeGetGeneratorImpl())->host;
  }
  return value;
}

c10::IValue to_device(Call& call, const c10::IValue& value) {
  if (value.isTensor()) return call.to_device(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> devices;
  for (const at::Tensor& tensor : value.toTensorVector()) devices.push_back(call.to_device(tensor));
  return devices;
}

// Any operator without a kernel of its own here: computed by the CPU, on the same bytes.
void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  Call call(schema.name());
  const bool is_index = schema.name() == "aten::index" || schema.name().rfind("aten::index_put", 0) == 0 ||
      schema.name() == "aten::_index_put_impl_";
  const size_t begin = stack->size() - arguments.size();
  // The device of a call is known only when its tensors were seen; a generator that is not given depends on it.
  std::vector<at::Tensor> written;
  for (bool generators : {false, true}) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      c10::IValue& value = (*stack)[begin + i];
      if (takes_generator(arguments[i]) != generators) continue;
      if (auto* alias = arguments[i].alias_info(); alias != nullptr && alias->isWrite()) {
        if (value.isTensor()) written.push_back(value.toTensor());
        if (value.isTensorList())
          for (const at::Tensor& tensor : value.toTensorVector()) written.push_back(tensor);
      }
      value = to_host(call, value, arguments[i], is_index && arguments[i].name() == "indices");
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (const at::Tensor& tensor : written) call.write_back(tensor);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    (*stack)[i] = to_device(call, (*stack)[i]);
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// The way between devices, and to and from the host: each side with a `Call` of its own.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  Call source("copy_"), target("copy_");
  target.to_host(to, true).copy_(source.to_host(from, true));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) const_cast<at::Tensor&>(to).resize_(from.sizes());
  return copy_from(from, to, false);
}

// With it, `Module.to` fills parameters, as for other devices; without, it makes new ones and unties tied weights.
bool fills_parameters(const at::Tensor&, const at::Tensor& from) { return from.layout() == at::kStrided; }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_has_compatible_shallow_copy_type", &fills_parameters);
  m.impl("record_stream", [](at::Tensor&, Stream) {});
  // Other devices than the known ones would compute these of simpler operators, and round differently.
  for (const char* name : {"silu_backward", "mish_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

// Autocast: the lists of CUDA. A cast is remembered until the block ends, as there.
enum class Cast { lower, float32, float32_unless_told, widest };

template <Cast cast>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  const auto& arguments = op.schema().arguments();
  auto begin = stack->end() - static_cast<int64_t>(arguments.size());
  auto to = cast == Cast::lower ? at::autocast::get_autocast_dtype(kSimulated) : at::kFloat;
  if (cast == Cast::widest) {
    to = at::autocast::get_autocast_dtype(kSimulated);
    for (auto value = begin; value != stack->end(); ++value) {
      if (value->isTensor()) to = at::autocast::prioritize(to, value->toTensor(), kSimulated);
      if (!value->isTensorList()) continue;
      for (const at::Tensor& tensor : value->toTensorVector()) to = at::autocast::prioritize(to, tensor, kSimulated);
    }
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = *(begin + static_cast<int64_t>(i));
    if (cast == Cast::float32_unless_told) {
      bool is_float = begin->isTensor() && begin->toTensor().is_floating_point();
      if (is_float && arguments[i].name() == "dtype" && value.isNone()) value = at::kFloat;
    } else if (value.isTensor()) {
      value = at::autocast::cached_cast(to, value.toTensor(), kSimulated);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector())
        tensors.push_back(at::autocast::cached_cast(to, tensor, kSimulated));
      value = tensors;
    }
  }
  op.callBoxed(stack);
}

#define CAST(how, name, ...) \
  m.impl(#name __VA_OPT__("." #__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&autocast<Cast::how>>());
#define LOWER(...) CAST(lower, __VA_ARGS__)
#define FLOAT32(...) CAST(float32, __VA_ARGS__)
#define FLOAT32_UNLESS_TOLD(...) CAST(float32_unless_told, __VA_ARGS__)
#define WIDEST(...) CAST(widest, __VA_ARGS__)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_UNLESS_TOLD)
  AT_FORALL_PROMOTE(WIDEST)
}

#include "collectives.h"

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("device_count", [] { return int(device_count()); });
  m.def("default_generator", [](int index) { return default_generator(index); });
  m.def("group_on", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(std::move(gloo));
  });
}
