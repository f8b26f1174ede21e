"""A run's policy or critic as a Hugging Face folder of its own, checked by reading it back. Needs no Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel, PreTrainedTokenizerBase

from paceline.config import ModelConfig, PPOConfig
from paceline.config.load import read_policy_config, read_saved
from paceline.config.path_checks import model_config
from paceline.data.tokenizer import load_tokenizer
from paceline.engine import Engine, EngineSpec, get_engine
from paceline.engine.hf_models import ModelKind, filled_model, quiet_transformers, write_model
from paceline.engine.lora import ADAPTER_CONFIG, LoraSpec, read_lora_config
from paceline.errors import CheckpointError
from paceline.files import replacing_folder
from paceline.protocol import DataProto
from paceline.run_folder import ACTOR, CHECKPOINTS_FOLDER, CONFIG_FILE, default_run_dir
from paceline.trainer.ppo.checkpoint import find_part

Role = Literal["actor", "critic"]

KINDS: dict[Role, ModelKind] = {"actor": "causal_lm", "critic": "value"}
TOLERANCE = 1e-3
"""How far what the model says may change in float32; in bfloat16 the weights are compared instead."""
_NUM_SEQUENCES, _NUM_TOKENS, _NUM_ASKED = 4, 32, 24


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    source: Path
    """The role's folder in the checkpoint."""
    num_parameters: int
    merged: bool
    """Whether a LoRA adapter was merged."""
    largest_difference: float
    """Between what the exported model and its source say of a few sequences: log-probs of the actor, values of the
    critic."""


def export_run(
    run: Path,
    output: Path,
    *,
    step: int | None = None,
    role: Role = "actor",
    dtype: Literal["float32", "bfloat16"] = "float32",
    force: bool = False,
) -> Exported:
    """Write the role of a checkpoint (the newest complete one, or that of `step`) to `output`, and check it.

    `output` appears when all is well; with `force` it replaces what was there.
    """
    run, output = run.expanduser(), output.expanduser()
    cfg = _read_run(run)
    _check_output(output, run, force=force)
    source = find_part(run / CHECKPOINTS_FOLDER, role, step)
    refuse_reward_model(source)
    engine, model = _load(cfg, role, source)
    weights = {name: weight.to(getattr(torch, dtype)) for name, weight in engine.named_full_weights()}
    with replacing_folder(output) as folder:
        num_parameters = write_model(model, KINDS[role], weights, folder)
        _tokenizer(cfg, source).save_pretrained(folder)
        difference = _check(folder, engine, weights, trust_remote_code=model.trust_remote_code)
        if dtype == "float32" and not difference <= TOLERANCE:
            raise CheckpointError(
                f"the exported model differs from {source}: by {difference:.2g} in what it says of a few sequences, "
                f"more than {TOLERANCE:g}. Nothing was written to {output}."
            )
    return Exported(
        folder=output,
        source=source,
        num_parameters=num_parameters,
        merged=engine.spec.lora is not None,
        largest_difference=difference,
    )


def _read_run(run: Path) -> PPOConfig:
    if not (run / CONFIG_FILE).exists():
        raise CheckpointError(
            f"{run} is not a run: it has no {CONFIG_FILE}. Give the folder of a run, which trainer.default_local_dir "
            f"names (else {default_run_dir('<project>', '<experiment>')})."
        )
    if not (run / CHECKPOINTS_FOLDER).exists():
        raise CheckpointError(
            f"{run} is a run without checkpoints, so there is no trained model to export. Train it with "
            "trainer.save_freq set, which saves every so many steps and at the end."
        )
    # Only the models' sections matter: keys of another version elsewhere are no reason to stop.
    return read_policy_config(read_saved(run / CONFIG_FILE)).cfg


def refuse_reward_model(source: Path) -> None:
    """A role's folder whose model scores texts is none that answers."""
    if any(name.endswith("ForSequenceClassification") for name in model_config(source).get("architectures") or ()):
        raise CheckpointError(
            f"{source} is a reward model, and no policy. It is a Hugging Face folder as it is: reward_model.model.path "
            "takes it."
        )


def _check_output(output: Path, run: Path, *, force: bool) -> None:
    if run.resolve().is_relative_to(output.resolve()) or output.resolve().is_relative_to(
        (run / CHECKPOINTS_FOLDER).resolve()
    ):
        raise CheckpointError(f"{output} would replace a part of the run {run}; set --output to another folder.")
    if output.is_file():
        raise CheckpointError(f"{output} is a file; set --output to a folder.")
    if output.is_dir() and any(output.iterdir()) and not force:
        raise CheckpointError(f"{output} is not empty; set --output to a new folder, or --force to replace it.")


def _load(cfg: PPOConfig, role: Role, source: Path) -> tuple[Engine, ModelConfig]:
    """The checkpoint as a training engine holds it, and where the model to fill is."""
    policy = cfg.actor_rollout_ref.model
    lora = None
    path = str(source)
    if (source / ADAPTER_CONFIG).is_file():
        saved = read_lora_config(source)
        lora = LoraSpec(saved.r, saved.lora_alpha, sorted(saved.target_modules))
        path = str(policy.path)
    section = policy if role == "actor" else cfg.critic.model
    model = ModelConfig(path=path, trust_remote_code=section.trust_remote_code)
    engine = get_engine("local")(EngineSpec(model=model, kind=KINDS[role], lora=lora))
    engine.initialize()
    if lora is not None:
        engine.load(source)
    return engine, model


def merged_policy(cfg: PPOConfig, source: Path) -> PreTrainedModel:
    """The policy of a checkpoint as one plain model, its adapter merged."""
    engine, model = _load(cfg, "actor", source)
    return filled_model(model, "causal_lm", dict(engine.named_full_weights()))


def _tokenizer(cfg: PPOConfig, source: Path) -> PreTrainedTokenizerBase:
    """The one that was saved with the actor, else the policy's."""
    policy = cfg.actor_rollout_ref.model
    saved = source.parent / ACTOR
    path = saved if (saved / "tokenizer_config.json").is_file() else policy.tokenizer_path or policy.path
    return load_tokenizer(str(path), trust_remote_code=policy.trust_remote_code)


@torch.no_grad()
def _check(folder: Path, engine: Engine, weights: dict[str, Tensor], *, trust_remote_code: bool) -> float:
    """Read `folder` as anyone would; every weight must be there. Gives the largest difference in what it says."""
    is_policy = engine.spec.kind == "causal_lm"
    auto_class = AutoModelForCausalLM if is_policy else AutoModelForTokenClassification
    with quiet_transformers():
        model, info = auto_class.from_pretrained(  # type: ignore[misc]  # a pair with output_loading_info
            folder, dtype=torch.float32, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    model.eval()
    state = model.state_dict()
    lost = [name for name, weight in weights.items() if not torch.equal(state[name], weight.float())]
    lost += [*info["missing_keys"], *info["unexpected_keys"]]
    if lost:
        raise CheckpointError(f"the exported model lost {len(lost)} weights, such as {lost[0]}.")

    data = _sequences(model.config.get_text_config().vocab_size)
    expected = next(iter(engine.infer_batch(data, micro_batch_size=1).values()))
    tokens = data.batch["input_ids"]
    logits = model(input_ids=tokens).logits[:, -_NUM_ASKED - 1 : -1].float()
    if is_policy:
        logits = logits.log_softmax(dim=-1).gather(-1, tokens[:, -_NUM_ASKED:, None])
    return float((logits[..., 0] - expected).abs().max())


def _sequences(vocabulary: int) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (_NUM_SEQUENCES, _NUM_TOKENS), generator=generator)
    return DataProto.from_dict(
        {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "position_ids": torch.arange(_NUM_TOKENS).expand_as(tokens),
            "response_mask": torch.ones(_NUM_SEQUENCES, _NUM_ASKED, dtype=torch.int64),
        }
    )
