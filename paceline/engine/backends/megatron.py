"""Megatron-Core: its GPT model with tensor parallelism, in stages (`stages`), and copies for what is left of the ranks.

Llama, Qwen2 and Qwen3, dense. Gradients are summed over data-parallel ranks once per optimizer step. On an accelerator
it computes with Transformer Engine's layers where that is installed, with its own Adam and its own recomputation; that
has not been run. On a CPU: see `_cpu_stand_ins`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import pad, silu
from torch.optim import Optimizer
from transformers import PretrainedConfig

from paceline.config import OptimConfig
from paceline.engine.backends.own_model import OwnModelEngine, Part, head_answers
from paceline.engine.backends.stages import Stages
from paceline.engine.distributed import gather_objects
from paceline.engine.engine_interface import register_engine
from paceline.engine.hf_models import ModelKind
from paceline.engine.logprobs import TOKEN_STATISTICS
from paceline.engine.model_calls import ModelCall
from paceline.errors import ConfigError


@register_engine("megatron")
class MegatronEngine(OwnModelEngine):
    """A rank of a tensor-parallel group holds a part of each layer of its stage; data-parallel ranks hold the same."""

    model_types = ("llama", "qwen2", "qwen3")
    model: _MegatronDecoder
    tensor_parallel_group: dist.ProcessGroup | None = None
    """The ranks that hold each layer together; None: each has whole layers."""

    def _build(self) -> _MegatronDecoder:
        on_cpu = self.spec.device == "cpu"
        self._join_groups()
        config = self.hf_model.config
        with _cpu_stand_ins() if on_cpu else nullcontext():
            return _MegatronDecoder(self._layers(config), config, self.spec.kind, on_cpu, self.stages).to(self.device)

    def _join_groups(self) -> None:
        """Megatron keeps one set of groups per process, so all roles of a process have the same sizes."""
        size, stages = self.tensor_parallel_size, self.pipeline_parallel_size
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=size, pipeline_model_parallel_size=stages
            )
            if self.spec.device != "cpu":
                # Layers ask for this state by name, though without dropout nothing is drawn from it.
                with torch.random.fork_rng([torch.accelerator.current_device_index()], device_type=self.spec.device):
                    tensor_parallel.model_parallel_cuda_manual_seed(0)
        known = {
            "tensor_model_parallel_size": (size, parallel_state.get_tensor_model_parallel_world_size()),
            "pipeline_model_parallel_size": (stages, parallel_state.get_pipeline_model_parallel_world_size()),
        }
        for name, (asked, found) in known.items():
            if asked != found:
                raise ConfigError(
                    f"strategy=megatron: megatron.{name}={asked}, but another role on these devices has {found}; set "
                    "the same for both, or trainer.placement.name=split."
                )
        if size > 1:
            self.tensor_parallel_group = parallel_state.get_tensor_model_parallel_group()
        self.stages = Stages(parallel_state.get_pipeline_model_parallel_group())
        self.row_group = self.tensor_parallel_group if stages == 1 else parallel_state.get_model_parallel_group()

    def _all_parts(self) -> Iterator[tuple[Part | None, tuple[str, ...]]]:
        for stage, parts in enumerate(self._parts_by_stage):
            for place, (names, _) in enumerate(parts):
                yield self.parts[place] if stage == self.stages.index else None, names

    def named_full(self, of: Callable[[nn.Parameter], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Each stage tells the others what it has."""
        for stage, parts in enumerate(self._parts_by_stage):
            for place, (names, is_copy) in enumerate(parts):
                if is_copy:
                    continue
                if stage == self.stages.index:
                    tensors = self.parts[place].to_hf(of(self.parts[place].parameter))
                else:
                    shapes = [self.hf_model.get_parameter(name).shape for name in names]
                    tensors = [torch.empty(shape, device=self.device) for shape in shapes]
                for name, tensor in zip(names, tensors, strict=True):
                    whole = tensor.detach().contiguous()
                    if self.stages.count > 1:
                        dist.broadcast(whole, group=self.stages.group, group_src=stage)
                    yield name, whole

    def _layers(self, config: PretrainedConfig) -> TransformerConfig:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        return TransformerConfig(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_key_value_heads,
            kv_channels=_head_dim(config),
            normalization="RMSNorm",
            layernorm_epsilon=config.rms_norm_eps,
            qk_layernorm=config.model_type == "qwen3",
            gated_linear_unit=True,
            activation_func=silu,
            add_bias_linear=False,
            add_qkv_bias=config.model_type == "qwen2",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=self.tensor_parallel_size,
            pipeline_model_parallel_size=self.pipeline_parallel_size,
            pipeline_dtype=torch.float32,
            params_dtype=torch.float32,
            perform_initialization=False,
            use_cpu_initialization=self.spec.device == "cpu",
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            **(recompute if self._recomputes else {}),
        )

    def _calls(self) -> AbstractContextManager[None]:
        return _cpu_stand_ins() if self.spec.device == "cpu" else nullcontext()

    def _make_optimizer(self, config: OptimConfig) -> Optimizer:
        if self.spec.device == "cpu":
            return super()._make_optimizer(config)
        from megatron.core.optimizer import Adam  # Transformer Engine's, apex's or torch's, as it finds them

        return Adam(
            self.model.parameters(),
            lr=config.lr,
            betas=tuple(config.betas),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    def _clip_grad_norm(self, max_norm: float) -> Tensor:
        """Gradients are summed over data-parallel ranks here; their norm counts what ranks have in common once."""
        parameters: list[Any] = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        copies = {id(part.parameter) for part in self.parts if part.is_copy}
        if self._ties_stages and (self.stages.is_first or self.stages.is_last):
            tied = self.model.gpt.embedding.word_embeddings if self.stages.is_first else self.model.gpt.output_layer
            dist.all_reduce(tied.weight.grad, group=parallel_state.get_embedding_group())
        if self.tensor_parallel_group is not None:
            # Each rank has the norms of queries and keys whole, and their gradients from its own heads.
            for name, weight in self.model.named_parameters():
                if name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
                    dist.all_reduce(weight.grad, group=self.tensor_parallel_group)
        squares = torch.zeros(2, device=self.device)
        for parameter in parameters:
            dist.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group())
            if id(parameter) not in copies:
                squares[int(parameter.tensor_model_parallel)] += parameter.grad.float().square().sum()
        if self.tensor_parallel_group is not None:
            dist.all_reduce(squares[1], group=self.tensor_parallel_group)
        if self.stages.count > 1:
            dist.all_reduce(squares, group=self.stages.group)
        norm = squares.sum().sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            parameter.grad.mul_(scale)
        return norm

    def _make_parts(self) -> list[Part]:
        """What a rank has of a Hugging Face tensor is an even piece of it, by rows or by columns."""
        config, gpt, count = self.hf_model.config, self.model.gpt, self.tensor_parallel_size
        head_dim = _head_dim(config)
        parts: list[Part] = []
        if self.stages.is_first:
            parts.append(self._part(gpt.embedding.word_embeddings.weight, ("model.embed_tokens.weight",), dim=0))
        for layer in gpt.decoder.layers:
            prefix = f"model.layers.{layer.layer_number - 1}."
            attention, mlp = layer.self_attention, layer.mlp
            projections = tuple(f"{prefix}self_attn.{name}_proj." for name in "qkv")
            groups = config.num_key_value_heads // count
            queries = config.num_attention_heads // config.num_key_value_heads
            sizes = [queries * head_dim, head_dim, head_dim]

            def fuse(pieces: list[Tensor], groups: int = groups) -> Tensor:
                """Each group of query heads is followed by its key head and its value head."""
                by_group = [piece.unflatten(0, (groups, -1)) for piece in pieces]
                return torch.cat(by_group, dim=1).flatten(0, 1)

            def split(fused: Tensor, groups: int = groups, sizes: list[int] = sizes) -> list[Tensor]:
                return [piece.flatten(0, 1) for piece in fused.unflatten(0, (groups, -1)).split(sizes, dim=1)]

            for kind in ("weight", "bias") if config.model_type == "qwen2" else ("weight",):
                names = tuple(projection + kind for projection in projections)
                parts.append(self._part(getattr(attention.linear_qkv, kind), names, 0, fuse, split))
            # Transformer Engine has a norm and the layer behind it in one.
            norms = {
                "input_layernorm": (layer.input_layernorm, attention.linear_qkv),
                "post_attention_layernorm": (layer.pre_mlp_layernorm, mlp.linear_fc1),
            }
            for name, (norm, fused_norm) in norms.items():
                weight = getattr(norm, "weight", None)
                parts.append(
                    self._part(fused_norm.layer_norm_weight if weight is None else weight, (f"{prefix}{name}.weight",))
                )
            if config.model_type == "qwen3":
                parts.append(self._part(attention.q_layernorm.weight, (f"{prefix}self_attn.q_norm.weight",)))
                parts.append(self._part(attention.k_layernorm.weight, (f"{prefix}self_attn.k_norm.weight",)))
            parts.append(self._part(attention.linear_proj.weight, (f"{prefix}self_attn.o_proj.weight",), dim=1))
            gate_and_up = (f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight")
            parts.append(
                self._part(mlp.linear_fc1.weight, gate_and_up, 0, torch.cat, lambda fused: list(fused.chunk(2)))
            )
            parts.append(self._part(mlp.linear_fc2.weight, (f"{prefix}mlp.down_proj.weight",), dim=1))
        if self.stages.is_last:
            parts.append(self._part(gpt.decoder.final_layernorm.weight, ("model.norm.weight",)))
        if self.stages.is_last and self._ties_stages:
            head = self._part(gpt.output_layer.weight, ("model.embed_tokens.weight",), dim=0)
            parts.append(replace(head, is_copy=True))
        elif self.stages.is_last and self.spec.kind == "causal_lm" and not config.tie_word_embeddings:
            parts.append(self._part(gpt.output_layer.weight, ("lm_head.weight",), dim=0))
        if self.model.score is not None:
            parts += [self._part(value, (f"score.{name}",)) for name, value in self.model.score.named_parameters()]
        self._parts_by_stage = gather_objects([(part.names, part.is_copy) for part in parts], self.stages.group)
        return parts

    @property
    def _ties_stages(self) -> bool:
        """Whether the first stage's embeddings are the last stage's head, which has them, too."""
        tied: bool = self.hf_model.config.tie_word_embeddings
        return tied and self.spec.kind == "causal_lm" and self.stages.count > 1

    def _part(
        self,
        parameter: nn.Parameter,
        names: tuple[str, ...],
        dim: int | None = None,
        fuse: Callable[[list[Tensor]], Tensor] = lambda pieces: pieces[0],
        split: Callable[[Tensor], list[Tensor]] = lambda fused: [fused],
    ) -> Part:
        """`fuse` makes a rank's parameter of its pieces of what `names` are, along `dim`; `split` undoes it."""
        count, group = self.tensor_parallel_size, self.tensor_parallel_group
        rank = 0 if group is None else dist.get_rank(group)
        # Megatron marks shares itself only where it also draws their values.
        setattr(parameter, "tensor_model_parallel", dim is not None)  # noqa: B010 - torch's type has no such field
        lengths = [0 if dim is None else self.hf_model.get_parameter(name).shape[dim] for name in names]

        def to_hf(share: Tensor) -> list[Tensor]:
            if dim is None or count == 1:
                return split(share)
            whole = []
            for piece, length in zip(split(share), lengths, strict=True):
                pieces = [torch.empty_like(piece, memory_format=torch.contiguous_format) for _ in range(count)]
                dist.all_gather(pieces, piece.contiguous(), group=self.tensor_parallel_group)
                whole.append(torch.cat(pieces, dim=dim).narrow(dim, 0, length))
            return whole

        def from_hf(whole: list[Tensor]) -> Tensor:
            if dim is None:
                return fuse(whole)
            # Only the vocabulary need not be divisible.
            return fuse([_padded(tensor, dim, count).chunk(count, dim=dim)[rank] for tensor in whole])

        return Part(parameter, names, to_hf, from_hf)


class _MegatronDecoder(nn.Module):
    """Megatron's GPT and a head, or the stage of it that this rank has, called as an AnswerModel is."""

    def __init__(
        self, layers: TransformerConfig, config: PretrainedConfig, kind: ModelKind, on_cpu: bool, stages: Stages
    ) -> None:
        super().__init__()
        self.stages = stages
        self.kind = kind
        self.on_cpu = on_cpu
        self.padding_id = config.pad_token_id
        """As an input, Hugging Face's embeddings never learn it."""
        self.vocabulary = config.vocab_size
        self.share = -(-config.vocab_size // layers.tensor_model_parallel_size)
        """Rows of the vocabulary per rank; the last may have fewer, and zeros after them."""
        use_te = HAVE_TE and not on_cpu
        spec = (
            get_gpt_layer_with_transformer_engine_spec(qk_layernorm=layers.qk_layernorm)
            if use_te
            else get_gpt_layer_local_spec(qk_layernorm=layers.qk_layernorm, normalization="RMSNorm")
        )
        self.gpt = GPTModel(
            config=layers,
            transformer_layer_spec=spec,
            vocab_size=self.share * layers.tensor_model_parallel_size,
            max_sequence_length=config.max_position_embeddings,
            position_embedding_type="rope",
            rotary_base=config.rope_parameters["rope_theta"],
            # Without a head of their own the other kinds have no unused parameters. Between stages, the engine ties.
            share_embeddings_and_output_weights=stages.count == 1
            and (config.tie_word_embeddings or kind != "causal_lm"),
            pre_process=stages.is_first,
            post_process=stages.is_last,
        )
        if stages.count > 1 and stages.is_last and kind != "causal_lm":
            del self.gpt.output_layer
        self.score: nn.Linear | None = None
        if kind != "causal_lm" and stages.is_last:
            # As Hugging Face's classes have it.
            self.score = nn.Linear(config.hidden_size, 1, bias=kind == "value")

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.gpt.config.recompute_granularity == "full"

    def forward(self, call: ModelCall, temperature: float) -> dict[str, Tensor]:
        """(asked,) float32 each: `TOKEN_STATISTICS` of the next tokens; `values`; or `scores`."""
        input_ids = call.inputs["input_ids"]
        with _cpu_stand_ins() if self.on_cpu else nullcontext():
            hidden = self._hidden(input_ids)
        if not self.stages.is_last:
            names = {"causal_lm": TOKEN_STATISTICS[: 2 + call.sum_pi_squared], "value": ("values",)}
            columns = names.get(self.kind, ("scores",))
            answers = self.stages.answers_behind(hidden, (len(columns), len(call.places)))
            return dict(zip(columns, answers.unbind(), strict=True))
        found = self._answers(hidden.transpose(0, 1).flatten(0, 1)[call.places], call, temperature)
        if self.stages.count > 1:
            self.stages.tell(torch.stack(list(found.values())))
        return found

    def _hidden(self, input_ids: Tensor) -> Tensor:
        """(width, rows, hidden_size) after the layers that this rank has."""
        rows, width = input_ids.shape
        embedded: Tensor | None = None
        if self.stages.is_first:
            embedded = self.gpt.embedding(input_ids, torch.arange(width, device=input_ids.device).expand_as(input_ids))
            if self.padding_id is not None:
                embedded = torch.where((input_ids == self.padding_id).T[..., None], embedded.detach(), embedded)
        else:
            shape = (width, rows, self.gpt.config.hidden_size)
            self.gpt.decoder.set_input_tensor(self.stages.hidden_before(shape, input_ids.device))
        later = torch.ones(width, width, dtype=torch.bool, device=input_ids.device).triu(1)[None, None]
        hidden: Tensor = self.gpt.decoder(embedded, later, rotary_pos_emb=self.gpt.rotary_pos_emb(width))
        return hidden

    def _answers(self, hidden: Tensor, call: ModelCall, temperature: float) -> dict[str, Tensor]:
        """Of the hidden states at the places that are asked for."""
        if self.score is not None:
            outputs = self.score(hidden)[:, 0].float()
            return {"values" if self.kind == "value" else "scores": outputs}
        own_head = not self.gpt.share_embeddings_and_output_weights
        weight = self.gpt.output_layer.weight if own_head else self.gpt.embedding.word_embeddings.weight
        group = parallel_state.get_tensor_model_parallel_group()
        if group.size() > 1:  # without the rows of zeros
            weight = weight[: self.vocabulary - self.share * group.rank()]
        return head_answers(hidden, weight, call, temperature, share=self.share, group=group)


@contextmanager
def _cpu_stand_ins() -> Iterator[None]:
    """What Megatron's layers ask of CUDA while they are built, called and recomputed, answered for a CPU.

    Buffers are put on the device where the model is, and the random states that are not swapped in or kept would serve
    dropout alone, which is 0 in every model here. No arithmetic is replaced.
    """
    answers: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (CudaRNGStatesTracker, "fork", lambda self, *_: nullcontext()),
        (megatron_random, "_get_all_rng_states", lambda: ()),
        (megatron_random, "_set_all_rng_states", lambda: None),
    ]
    before = [getattr(owner, name) for owner, name, _ in answers]
    for owner, name, answer in answers:
        setattr(owner, name, answer)
    try:
        yield
    finally:
        for (owner, name, _), known in zip(answers, before, strict=True):
            setattr(owner, name, known)


def _padded(tensor: Tensor, dim: int, count: int) -> Tensor:
    """With zeros at the end of `dim`, so that `count` divides it."""
    missing = -tensor.shape[dim] % count
    return pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, missing]) if missing else tensor


def _head_dim(config: PretrainedConfig) -> int:
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim
