"""VeOmni: its models, whose operations can be fused kernels, under its FSDP2.

Models that VeOmni has classes for, such as Llama, Qwen2 and Qwen3. On an accelerator it chooses its own kernels and its
fused AdamW; that has not been run. On a CPU every operation is plain PyTorch, and nothing needs to be replaced.
"""

from __future__ import annotations

import os

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from transformers import PreTrainedModel

# VeOmni reports each step of its setup on standard output, and what it would do better with sequence parallelism.
os.environ.setdefault("VEOMNI_VERBOSITY", "ERROR")

from veomni.arguments import MixedPrecisionConfig
from veomni.arguments.arguments_types import OpsImplementationConfig
from veomni.distributed.parallel_state import init_parallel_state, is_parallel_state_initialized
from veomni.distributed.torch_parallelize import parallelize_model_fsdp2
from veomni.models import build_foundation_model
from veomni.models.loader import MODELING_REGISTRY
from veomni.optim import build_optimizer

from paceline.config import OptimConfig
from paceline.engine.answers import AnswerModel
from paceline.engine.backends.fsdp import Fsdp2Engine, layers_to_shard, sum_gradients
from paceline.engine.distributed import ensure_process_group
from paceline.engine.engine_interface import register_engine
from paceline.engine.hf_models import build_empty_model, build_model, prepare_model
from paceline.engine.training_state import set_weights
from paceline.errors import ConfigError


@register_engine("veomni")
class VeomniEngine(Fsdp2Engine):
    """As fsdp2, with VeOmni's classes for the model and VeOmni's sharding of it."""

    def _make_optimizer(self, config: OptimConfig) -> Optimizer:
        if self.spec.device == "cpu":
            return super()._make_optimizer(config)
        optimizer: Optimizer = build_optimizer(
            self.model,
            lr=config.lr,
            betas=tuple(config.betas),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        return optimizer

    def _build_model(self) -> PreTrainedModel:
        """Without weights. Those are Hugging Face's, read by rank 0, which also draws a head that they lack."""
        spec, train = self.spec, self.spec.trains
        ensure_process_group(spec.device, spec.collective_timeout_seconds)
        if not is_parallel_state_initialized():
            init_parallel_state(dp_size=self.world_size, dp_mode="fsdp2", device_type=spec.device)
        read = build_model if self.rank == 0 else build_empty_model
        source = read(spec.model, spec.kind, train=train)
        if source.config.model_type not in (known := sorted(MODELING_REGISTRY.valid_keys())):
            raise ConfigError(
                f"strategy=veomni has no model of type {source.config.model_type} ({spec.model.path}); it has "
                f"{', '.join(known)}. Set strategy=fsdp2."
            )
        self._full_weights: dict[str, Tensor] = source.state_dict() if self.rank == 0 else {}
        # VeOmni chooses the class by this name.
        source.config.architectures = [type(source).__name__]
        built = build_foundation_model(
            source.config, torch_dtype="float32", init_device="meta", ops_implementation=_operations(spec.device)
        )
        built.tie_weights()
        return prepare_model(built, spec.model, spec.kind, train=train)

    def _distribute(self, answers: AnswerModel) -> nn.Module:
        root = self._shard(answers, layers_to_shard(answers.model))
        set_weights(root, self._full_weights, from_rank0=True)
        self._full_weights = {}
        return root

    def _shard(self, answers: AnswerModel, layers: list[nn.Module], mesh: DeviceMesh | None = None) -> nn.Module:
        """`mesh` is VeOmni's own."""
        root = parallelize_model_fsdp2(
            answers,
            mixed_precision=MixedPrecisionConfig(enable=False),
            basic_modules=sorted({type(layer).__name__ for layer in layers}),
            should_skip_hf_weight_load=True,
            init_device="meta",
        )
        sum_gradients(root)
        return root

    def _clip_grad_norm(self, max_norm: float) -> Tensor:
        return self.root.clip_grad_norm_(max_norm)


def _operations(device: str) -> OpsImplementationConfig:
    """sdpa everywhere, since masks and packing rely on it; on an accelerator VeOmni's default kernels for the rest."""
    if device != "cpu":
        return OpsImplementationConfig(attn_implementation="sdpa")
    fused = ("rms_norm", "swiglu_mlp", "rotary_pos_emb", "cross_entropy_loss", "load_balancing_loss", "moe")
    plain = {f"{name}_implementation": "eager" for name in fused}
    return OpsImplementationConfig(attn_implementation="sdpa", **plain)
