// A part of device.cpp: the process group of the device.
#pragma once

// Collectives are gloo's, on the same bytes.
using Work = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

Tensors hosts(const Tensors& tensors) {
  Tensors seen;
  for (const auto& tensor : tensors) {
    TORCH_CHECK(tensor.device().type() == kSimulated, "a group of this device got a tensor of ", tensor.device());
    seen.push_back(Call("collective").to_host(tensor));
  }
  return seen;
}

std::vector<Tensors> hosts(const std::vector<Tensors>& lists) {
  std::vector<Tensors> seen;
  for (const auto& tensors : lists) seen.push_back(hosts(tensors));
  return seen;
}

at::Tensor host(const at::Tensor& tensor) { return hosts(Tensors{tensor})[0]; }

struct Collectives final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> group)
      : Backend(group->getRank(), group->getSize()), gloo(std::move(group)) {}
  const std::string getBackendName() const override { return "simulated"; }

#define COLLECTIVE(name, options)                                 \
  Work name(Tensors& tensors, const c10d::options& o) override { \
    auto seen = hosts(tensors);                                   \
    return gloo->name(seen, o);                                   \
  }
#define COLLECTIVE2(name, To, From, options)                            \
  Work name(To& to, From& from, const c10d::options& o) override {     \
    auto seen_to = hosts(to);                                           \
    auto seen_from = hosts(from);                                       \
    return gloo->name(seen_to, seen_from, o);                           \
  }
#define COLLECTIVE_BASE(name, options)                                             \
  Work name(at::Tensor& to, at::Tensor& from, const c10d::options& o) override {  \
    auto seen_to = host(to), seen_from = host(from);                               \
    return gloo->name(seen_to, seen_from, o);                                      \
  }
  COLLECTIVE(broadcast, BroadcastOptions)
  COLLECTIVE(allreduce, AllreduceOptions)
  COLLECTIVE(reduce, ReduceOptions)
  COLLECTIVE2(allgather, std::vector<Tensors>, Tensors, AllgatherOptions)
  COLLECTIVE2(allgather_into_tensor_coalesced, Tensors, Tensors, AllgatherOptions)
  COLLECTIVE2(gather, std::vector<Tensors>, Tensors, GatherOptions)
  COLLECTIVE2(scatter, Tensors, std::vector<Tensors>, ScatterOptions)
  COLLECTIVE2(reduce_scatter, Tensors, std::vector<Tensors>, ReduceScatterOptions)
  COLLECTIVE2(reduce_scatter_tensor_coalesced, Tensors, Tensors, ReduceScatterOptions)
  COLLECTIVE2(alltoall, Tensors, Tensors, AllToAllOptions)
  COLLECTIVE_BASE(_allgather_base, AllgatherOptions)
  COLLECTIVE_BASE(_reduce_scatter_base, ReduceScatterOptions)

  Work alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
                     const c10d::AllToAllOptions& options) override {
    auto seen_to = host(to), seen_from = host(from);
    return gloo->alltoall_base(seen_to, seen_from, to_sizes, from_sizes, options);
  }
  Work send(Tensors& tensors, int rank, int tag) override {
    auto seen = hosts(tensors);
    return gloo->send(seen, rank, tag);
  }
  Work recv(Tensors& tensors, int rank, int tag) override {
    auto seen = hosts(tensors);
    return gloo->recv(seen, rank, tag);
  }
  Work barrier(const c10d::BarrierOptions& options) override { return gloo->barrier(options); }
};
