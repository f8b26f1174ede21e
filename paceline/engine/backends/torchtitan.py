"""torchtitan: its Llama 3 and Qwen3 models under its FSDP and tensor parallelism.

Attention is torchtitan's SDPA on every device: rows begin with their first token, so causal attention is all they need.
Sequences are not packed, which would take its flex or varlen attention. Only a CPU has been tried: see the lines before
torchtitan's imports for what it needs there.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import linear
from torchtitan.tools import utils as titan_utils
from transformers import PretrainedConfig

if not torch.accelerator.is_available():
    # torchtitan takes a machine without accelerator for one with CUDA. What it imports later reads this. It says where
    # tensors and meshes are and replaces no arithmetic.
    titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu

import spmd_types as spmd
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.sharding import ShardingConfig

from paceline.engine.backends.fsdp import sum_gradients
from paceline.engine.backends.own_model import OwnModelEngine, Part, head_answers
from paceline.engine.engine_interface import register_engine
from paceline.engine.hf_models import ModelKind
from paceline.engine.model_calls import ModelCall
from paceline.errors import ConfigError
from paceline.private_apis.torch_private import CHECKPOINT_PREFIX, recomputes_activations, silence_mesh_advice

logging.getLogger("torchtitan").setLevel(logging.WARNING)  # it reports what it does to a model
silence_mesh_advice()

_SKIP = {"weight": skip_param_init, "bias": skip_param_init}
"""All values come from Hugging Face's weights."""


@register_engine("torchtitan")
class TorchtitanEngine(OwnModelEngine):
    """Tensor-parallel groups hold a part of each layer; data-parallel ranks hold shares of that, as with fsdp2."""

    model_types = ("llama", "qwen3")
    model: _TitanDecoder

    def _build(self) -> _TitanDecoder:
        if titan_utils.device_type != self.spec.device:
            raise ConfigError(
                f"strategy=torchtitan computes on {titan_utils.device_type} here, not on trainer.device="
                f"{self.spec.device}; set trainer.device={titan_utils.device_type}."
            )
        is_qwen = self.hf_model.config.model_type == "qwen3"
        self.titan_config = _model_config(self.hf_model.config, self.spec.kind)
        if is_qwen:
            set_qwen3_sharding_config(self.titan_config, enable_sp=False, enable_ep=False)
        else:
            set_llama3_sharding_config(self.titan_config, enable_sp=False)
        if self.spec.kind != "causal_lm":
            whole = dense_param_placement(tp=spmd.I)
            self.titan_config.lm_head.sharding_config = ShardingConfig(state_shardings={"weight": whole, "bias": whole})
        parallelism = ParallelismConfig(
            tensor_parallel_degree=self.tensor_parallel_size,
            enable_sequence_parallel=False,
            spmd_backend="partial_dtensor",
        )
        set_spmd_backend(parallelism.spmd_backend)
        dims = ParallelDims.from_config(parallelism, self.world_size)
        dims.build_mesh()
        mesh = dims.get_optional_mesh("tp")
        self.row_group = None if mesh is None else mesh.get_group()
        with torch.device("meta"):
            decoder = self.titan_config.build()
        (parallelize_qwen3 if is_qwen else parallelize_llama)(
            decoder,
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=parallelism,
            compile_config=CompileConfig(enable=False),
            ac_config=FullAC.Config(preserve_rng_state=False) if self._recomputes else None,
            dump_folder="",
        )
        decoder.to_empty(device=self.spec.device)
        with torch.no_grad():
            decoder.init_states(buffer_device=self.device)
        sum_gradients(decoder)
        return _TitanDecoder(decoder, self.spec.kind, self.hf_model.config, self.row_group)

    def _make_parts(self) -> list[Part]:
        """Names and the order of rotary dimensions are known to torchtitan's adapter."""
        is_qwen = self.hf_model.config.model_type == "qwen3"
        adapter = (Qwen3StateDictAdapter if is_qwen else Llama3StateDictAdapter)(self.titan_config, None)
        parts = []
        for key, parameter in self.model.decoder.named_parameters():
            key = key.replace(CHECKPOINT_PREFIX, "")
            if self.spec.kind != "causal_lm" and key.startswith("lm_head."):
                parts.append(_part(parameter, key.replace("lm_head", "score"), key, None))
                continue
            [name] = adapter.to_hf({key: torch.empty(parameter.shape, device="meta")})
            parts.append(_part(parameter, name, key, adapter))
        return parts

    def _after_inference(self) -> None:
        # As with fsdp2: what the last layers keep whole for a backward pass, which here won't come.
        for module in (self.model.decoder.tok_embeddings, self.model.decoder.norm, self.model.decoder):
            if hasattr(module, "reshard"):
                module.reshard()


class _TitanDecoder(nn.Module):
    """torchtitan's decoder, called as an AnswerModel is."""

    def __init__(
        self,
        decoder: Llama3Model | Qwen3Model,
        kind: ModelKind,
        config: PretrainedConfig,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.kind = kind
        self.group = group
        self.share = -(-config.vocab_size // (1 if group is None else group.size()))
        """Rows of the vocabulary per tensor-parallel rank; the last may have fewer."""
        # As an input, Hugging Face's embeddings never learn the padding token.
        first = 0 if group is None else self.share * group.rank()
        if config.pad_token_id is not None and first <= config.pad_token_id < first + self.share:
            decoder.tok_embeddings.padding_idx = config.pad_token_id - first
        # In the place of logits the head gives the answers: within its call FSDP has its parameters whole.
        decoder.lm_head.forward = self._head

    @property
    def is_gradient_checkpointing(self) -> bool:
        return recomputes_activations(self)

    def forward(self, call: ModelCall, temperature: float) -> dict[str, Tensor]:
        """(asked,) float32 each: `TOKEN_STATISTICS` of the next tokens; `values`; or `scores`."""
        self._asked = (call, temperature)
        return self.decoder(call.inputs["input_ids"])

    def _head(self, hidden: Tensor) -> dict[str, Tensor]:
        call, temperature = self._asked
        hidden = _local(hidden).flatten(0, 1)[call.places]
        head = self.decoder.lm_head
        weight = _local(head.weight)
        if self.kind != "causal_lm":
            outputs = linear(hidden, weight, None if head.bias is None else _local(head.bias))[:, 0].float()
            return {"values" if self.kind == "value" else "scores": outputs}
        return head_answers(hidden, weight, call, temperature, share=self.share, group=self.group)


def _local(value: Tensor) -> Tensor:
    """This rank's part. What all ranks have whole has the same gradient on all of them."""
    return value.to_local() if isinstance(value, DTensor) else value


def _part(
    parameter: nn.Parameter, name: str, key: str, adapter: Llama3StateDictAdapter | Qwen3StateDictAdapter | None
) -> Part:
    def to_hf(share: Tensor) -> list[Tensor]:
        whole = share.full_tensor() if isinstance(share, DTensor) else share
        return [whole if adapter is None else adapter.to_hf({key: whole})[name]]

    def from_hf(tensors: list[Tensor]) -> Tensor:
        [whole] = tensors
        if adapter is not None:
            # With tied weights the adapter wants a head in every state dict.
            whole = adapter.from_hf({"lm_head.weight": whole, name: whole})[key]
        if not isinstance(parameter, DTensor):
            return whole
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)

    return Part(parameter, (name,), to_hf, from_hf)


def _model_config(config: PretrainedConfig, kind: ModelKind) -> Llama3Model.Config | Qwen3Model.Config:
    """torchtitan's description of a Hugging Face model."""
    is_qwen = config.model_type == "qwen3"
    size, head_dim = config.hidden_size, getattr(config, "head_dim", None)
    head_dim = head_dim or size // config.num_attention_heads
    rope = (CosSinRoPE if is_qwen else ComplexRoPE).Config(
        dim=head_dim, max_seq_len=config.max_position_embeddings, theta=config.rope_parameters["rope_theta"]
    )

    def norm(width: int = size) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=width, eps=config.rms_norm_eps, param_init=_SKIP)

    def layer() -> Llama3TransformerBlock.Config | Qwen3TransformerBlock.Config:
        return (Qwen3TransformerBlock if is_qwen else Llama3TransformerBlock).Config(
            attention_norm=norm(),
            ffn_norm=norm(),
            attention=make_gqa_config(
                dim=size,
                n_heads=config.num_attention_heads,
                n_kv_heads=config.num_key_value_heads,
                head_dim=head_dim,
                wqkv_param_init=_SKIP,
                wo_param_init=_SKIP,
                inner_attention=ScaledDotProductAttention.Config(),
                rope=rope,
                qk_norm=norm(head_dim) if is_qwen else None,
            ),
            feed_forward=make_ffn_config(
                dim=size, hidden_dim=config.intermediate_size, w1_param_init=_SKIP, w2w3_param_init=_SKIP
            ),
        )

    is_policy = kind == "causal_lm"
    # As Hugging Face's classes have it, a head for values has a bias and one for scores has none.
    rows, bias = (config.vocab_size, False) if is_policy else (1, kind == "value")
    return (Qwen3Model if is_qwen else Llama3Model).Config(
        dim=size,
        vocab_size=config.vocab_size,
        tok_embeddings=Embedding.Config(num_embeddings=config.vocab_size, embedding_dim=size, param_init=_SKIP),
        norm=norm(),
        lm_head=Linear.Config(in_features=size, out_features=rows, bias=bias, param_init=_SKIP),
        layers=[layer() for _ in range(config.num_hidden_layers)],
        enable_weight_tying=config.tie_word_embeddings and is_policy,
    )
