"""What backends with models of their own share: torchtitan and megatron.

Such a backend says how each of its parameters is made of Hugging Face's (`Part`). From that follow weights in and out,
checkpoints in the common format, and the check at the start that its model computes what Hugging Face's computes.

With tensor or pipeline parallelism the ranks of a group hold one model together and must see the same rows: see
`SharedRows`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from paceline.config import TrainedModelConfig
from paceline.engine.answers import AnswerModel
from paceline.engine.distributed import AllRanks, ensure_process_group
from paceline.engine.hf_models import build_empty_model, build_model
from paceline.engine.logprobs import TOKEN_STATISTICS, hidden_log_probs_and_entropy, parallel_log_probs_and_entropy
from paceline.engine.model_calls import TOP_TOKENS, ModelCall, aligned_call, padded_call, two_sequences
from paceline.engine.shared_rows import SharedRows
from paceline.engine.top_tokens import Likeliest
from paceline.engine.training_state import Moments, Snapshot, Training, in_main_memory, read_training_state
from paceline.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """A parameter of the backend, and the Hugging Face parameters that it is made of."""

    parameter: nn.Parameter
    names: tuple[str, ...]
    to_hf: Callable[[Tensor], list[Tensor]]
    """From this rank's share of the parameter, or of what has its shape, to whole tensors by `names`. Collective."""
    from_hf: Callable[[list[Tensor]], Tensor]
    """The other way round."""
    is_copy: bool = False
    """Another rank has the same parameter, which counts: of tied embeddings, the head in the last stage."""


class OwnModelEngine(AllRanks, SharedRows):
    """`model` and `root` are the backend's module, called with a ModelCall and a temperature as an AnswerModel is."""

    takes_bfloat16 = False
    takes_packing = False
    model_types: tuple[str, ...]
    """What it has models for, as `model_type` in config.json."""
    hf_model: PreTrainedModel
    """The Hugging Face model without memory: for its names and its files."""

    # What a backend defines.

    @abstractmethod
    def _build(self) -> nn.Module:
        """Its module on this rank's device, with any weights; and the groups of ranks."""

    @abstractmethod
    def _make_parts(self) -> list[Part]:
        """All parameters of this rank, each once."""

    def _all_parts(self) -> Iterator[tuple[Part | None, tuple[str, ...]]]:
        """All parts of the model with their names, in one order on all ranks; None is a part of another rank's."""
        return ((part, part.names) for part in self.parts)

    # What follows.

    def _set_up_model(self) -> None:
        spec, train = self.spec, self.spec.trains
        ensure_process_group(spec.device, spec.collective_timeout_seconds)
        self.hf_model = build_empty_model(spec.model, spec.kind, train=train).to("meta")  # type: ignore[arg-type]  # its decorator hides its arguments
        self.hf_model.tie_weights()
        self._aliases = _names_of_tied(self.hf_model)
        self._check_support(self.hf_model.config)
        # Only rank 0 reads the weights, so a fresh value head is the same everywhere.
        source = build_model(spec.model, spec.kind, train=train) if self.rank == 0 else None
        self.root = self.model = self._build().requires_grad_(train).eval()
        self.parts = self._make_parts()
        self._check_parts()
        self._put_weights(source.state_dict() if source is not None else {})
        self._compare_with(source)

    def named_full_weights(self) -> Iterator[tuple[str, Tensor]]:
        with self.on_device():
            for name, weight in self.named_full(lambda parameter: parameter.detach()):
                for alias in self._aliases[name]:
                    yield alias, weight

    def weight_shapes(self, *, adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        assert not adapter  # takes_lora is False
        for name in dict.fromkeys(name for _, names in self._all_parts() for name in names):
            for alias in self._aliases[name]:
                yield alias, self.hf_model.get_parameter(name).detach()

    def named_full(self, of: Callable[[nn.Parameter], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """What each parameter has of its shape, such as its gradient, whole, by Hugging Face's names. Collective."""
        for part in self.parts:
            yield from zip(part.names, part.to_hf(of(part.parameter)), strict=True)

    def snapshot(self) -> Snapshot:
        with self.on_device(optimizer=True):
            return self._snapshot()

    def load(self, folder: str | Path) -> None:
        with self.on_device(optimizer=True):
            self._load(folder)

    def _snapshot(self) -> Snapshot:
        keep = self.rank == 0
        weights = in_main_memory(self.named_full(lambda parameter: parameter.detach()), keep=keep)
        training: Training | None = None
        if self.optimizer is not None:
            moments: Moments = {name: {} for _, names in self._all_parts() for name in names}
            state = self.optimizer.state
            for key in ("exp_avg", "exp_avg_sq") if self.num_steps else ():
                named = self.named_full(partial(_moment, state, key))
                for name, value in in_main_memory(named, keep=keep).items():
                    moments[name][key] = value
            for saved in moments.values():
                saved["step"] = torch.tensor(float(self.num_steps))
            training = {"moments": moments if self.num_steps else {}, "num_steps": self.num_steps}
        return Snapshot(self.rank, self.hf_model, weights, training if keep else None)

    def _load(self, folder: str | Path) -> None:
        state = self._training_state(self.hf_model)
        weights, moments, self.num_steps = read_training_state(Path(folder), state)
        self._put_weights(weights)
        if self.optimizer is None:
            return
        self.optimizer.state.clear()
        for part, names in self._all_parts() if self.num_steps else ():
            saved = [moments[name] for name in names] if self.rank == 0 else []
            shares = {
                key: self._share(part, names, [of_name[key] for of_name in saved]) for key in ("exp_avg", "exp_avg_sq")
            }
            if part is not None:
                step = torch.tensor(float(self.num_steps), device=self.device)  # where fused AdamW looks for it
                self.optimizer.state[part.parameter] = {"step": step, **shares}
        for group in self.optimizer.param_groups:
            if "step" in group:  # Fused Adams count here.
                group["step"] = self.num_steps

    @property
    def tensor_parallel_size(self) -> int:
        return self.spec.tensor_model_parallel_size

    @property
    def pipeline_parallel_size(self) -> int:
        return self.spec.pipeline_model_parallel_size

    @property
    def _recomputes(self) -> bool:
        model = self.spec.model
        return self.spec.trains and isinstance(model, TrainedModelConfig) and model.enable_gradient_checkpointing

    def _answer(
        self,
        micro_batch: TensorDict,
        temperature: float,
        *,
        sum_pi_squared: bool = False,
        likeliest: Likeliest | None = None,
    ) -> dict[str, Tensor]:
        if likeliest is not None or micro_batch.get(TOP_TOKENS, None) is not None:
            raise ConfigError(f"{self.strategy} gives the log-prob of one token at a place. Set strategy=fsdp2.")
        call = replace(aligned_call(micro_batch, self.spec.kind, self.device), sum_pi_squared=sum_pi_squared)
        answers: dict[str, Tensor] = self.root(call, temperature)
        return answers

    def _put_weights(self, weights: dict[str, Tensor]) -> None:
        """Give every rank its share of a Hugging Face state dict that rank 0 has. Collective."""
        for part, names in self._all_parts():
            share = self._share(part, names, [weights[name] for name in names] if self.rank == 0 else [])
            if part is not None:
                with torch.no_grad():
                    part.parameter.copy_(share)

    def _share(self, part: Part | None, names: tuple[str, ...], whole: list[Tensor]) -> Tensor:
        """This rank's share, which may be nothing, of what rank 0 has as whole tensors. Collective."""
        tensors = []
        for place, name in enumerate(names):
            known = self.hf_model.get_parameter(name)
            if self.rank == 0:
                tensor = whole[place].detach().to(self.device, copy=True).contiguous()
            else:
                tensor = torch.empty(known.shape, dtype=known.dtype, device=self.device)
            dist.broadcast(tensor, src=0)
            tensors.append(tensor)
        if part is None:
            return torch.empty(0)
        return part.from_hf(tensors).contiguous()  # fused AdamW takes moments to lie in memory as their parameter does

    def _check_support(self, config: PretrainedConfig) -> None:
        """Raise ConfigError where this backend's model would not be the one of `config`."""
        text = config.get_text_config()
        problem = ""
        if config.model_type not in self.model_types:
            problem = f"a model of type {config.model_type}: it has {', '.join(self.model_types)}"
        elif getattr(text, "hidden_act", "silu") != "silu":
            problem = f"hidden_act={text.hidden_act}: it has silu"
        elif set(getattr(text, "layer_types", None) or ()) - {"full_attention"}:
            problem = "layers other than those of full attention"
        elif (text.rope_parameters or {}).get("rope_type", "default") != "default":
            problem = f"rope_type={text.rope_parameters['rope_type']}: it has plain rotary embeddings"
        elif text.num_key_value_heads % self.tensor_parallel_size:
            problem = (
                f"{text.num_key_value_heads} key-value heads on tensor_model_parallel_size={self.tensor_parallel_size} "
                "ranks, which must divide them"
            )
        elif self.world_size % (self.tensor_parallel_size * self.pipeline_parallel_size):
            sizes = f"tensor_model_parallel_size={self.tensor_parallel_size}"
            if self.pipeline_parallel_size > 1:
                sizes += f" times pipeline_model_parallel_size={self.pipeline_parallel_size}"
            problem = f"{sizes}, which does not divide its {self.world_size} ranks"
        elif text.num_hidden_layers % self.pipeline_parallel_size:
            problem = (
                f"{text.num_hidden_layers} layers in pipeline_model_parallel_size={self.pipeline_parallel_size} "
                "stages, which must divide them"
            )
        if problem:
            raise ConfigError(
                f"strategy={self.strategy} can't hold {self.spec.model.path}: {problem}. Set strategy=fsdp2."
            )

    def _check_parts(self) -> None:
        """Raise ConfigError where the Hugging Face model has parameters that this backend's has not."""
        names = [name for _, of_part in self._all_parts() for name in of_part]
        if unknown := set(self._aliases).symmetric_difference(names):
            raise ConfigError(
                f"strategy={self.strategy} can't hold {self.spec.model.path}: its model has no place for "
                f"{min(unknown)}. Set strategy=fsdp2."
            )

    @torch.no_grad()
    def _compare_with(self, source: PreTrainedModel | None) -> None:
        """Raise ConfigError unless this model and rank 0's `source` agree on two short sequences. Collective."""
        answers = self._answer(two_sequences(), 1.0)
        self._after_inference()
        problem = ""
        if source is not None:
            call = padded_call(two_sequences(), self.spec.kind, torch.device("cpu"))
            reference = AnswerModel(source, self.spec.kind)
            reference.head_apart = reference.mlp_apart = False
            for name, expected in reference(call, 1.0).items():
                error = float((answers[name].cpu() - expected).abs().max())
                if not error <= 0.01 * float(expected.max() - expected.min()) + 1e-5 * float(expected.abs().max()):
                    problem = f"{name} of two short sequences differ by {error:.1g}"
        if problem := self._gather(problem)[0]:
            raise ConfigError(
                f"strategy={self.strategy} does not compute what {self.spec.model.path} means: {problem}. "
                "Set strategy=fsdp2."
            )


def head_answers(
    hidden: Tensor, weight: Tensor, call: ModelCall, temperature: float, *, share: int, group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """`TOKEN_STATISTICS` (asked,) of the next tokens, by a head of which `weight` holds this rank's rows.

    `hidden` (asked, size) is at the places that the call asks for. Each rank of a tensor-parallel `group` has `share`
    rows, the last one maybe fewer.
    """
    if group is None or group.size() == 1:
        statistics = hidden_log_probs_and_entropy(
            hidden, weight, None, call.tokens, temperature, sum_pi_squared=call.sum_pi_squared
        )
    else:
        statistics = parallel_log_probs_and_entropy(
            hidden,
            weight,
            call.tokens,
            temperature,
            first=share * group.rank(),
            largest=share,
            group=group,
            sum_pi_squared=call.sum_pi_squared,
        )
    return dict(zip(TOKEN_STATISTICS, statistics, strict=False))


def _names_of_tied(model: PreTrainedModel) -> dict[str, list[str]]:
    """The first name of each parameter to all of its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: [first, *others] for first, *others in names.values()}


def _moment(state: dict[Tensor, dict[str, Tensor]], key: str, parameter: nn.Parameter) -> Tensor:
    return state[parameter][key]
