"""A model, or a checkpoint of a run, that answers prompts and has the answers graded as in training. No Ray.

policy = SavedPolicy.open("runs/paceline/ppo", step=40, sampling=SamplingOptions(temperature=0.0))
rows = policy.grade(policy.answer(policy.read_data("test.parquet", limit=20), n=1, seed=0))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from omegaconf import OmegaConf
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.config import PolicyModelConfig, PPOConfig
from paceline.config.load import read_policy_config, read_saved
from paceline.data.rl_dataset import RLHFDataset, collate_fn
from paceline.data.tokenizer import load_tokenizer
from paceline.engine.hf_models import build_model
from paceline.engine.lora import ADAPTER_CONFIG
from paceline.errors import ConfigError, DataError
from paceline.external import import_external
from paceline.protocol import DataProto
from paceline.redaction import MASK
from paceline.report.dumps import generation_rows
from paceline.report.json_lines import Row
from paceline.rewards import make_reward_manager
from paceline.rollout.postprocess import prompt_token_lists, to_batch
from paceline.rollout.rollout_interface import RolloutEngine, RolloutSpec, SamplingParams, get_rollout
from paceline.run_folder import (
    ACTOR,
    CHECKPOINT_PREFIX,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    METRICS_FILE,
    list_checkpoints,
    step_of,
)
from paceline.trainer.device import detect_device
from paceline.trainer.hf_export import merged_policy, refuse_reward_model
from paceline.trainer.ppo.checkpoint import find_part, first_whole_part
from paceline.trainer.ppo.step import make_requests

Columns = dict[str, Any]
"""Tensors and labels of one row by name."""
SECRETS_OF_SCORES = ("custom_reward_function.reward_kwargs", "reward_model.sandbox.url")
"""Keys of a run whose values may be secrets, or hold some, and are needed to score."""
LONGEST_PROMPT = 1 << 15
"""In tokens, for tokenizers that name no length."""
RESPONSE_TOKENS = 256
"""Longest response of a model that belongs to no run."""


@dataclass(frozen=True)
class Origin:
    """Where the weights are, and the configuration of the run that they come from; the defaults without a run."""

    model: str
    config: PPOConfig
    run_dir: Path | None = None
    """The run's folder; None of a model that belongs to no run."""
    step: int | None = None
    """The step of the run; 0 is the model that it began with."""


@dataclass(frozen=True)
class SamplingOptions:
    """What a command asks of the sampling; None is as the run does it, or as usual where there is no run."""

    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    max_tokens: int | None = None

    def params(self, origin: Origin) -> SamplingParams:
        """All of it."""
        usual = origin.config.actor_rollout_ref.rollout
        temperature = usual.temperature if self.temperature is None else self.temperature
        of_run = origin.config.data.max_response_length if origin.run_dir is not None else RESPONSE_TOKENS
        return SamplingParams(
            max_tokens=self.max_tokens or of_run,
            temperature=temperature or 1.0,
            top_p=usual.top_p if self.top_p is None else self.top_p,
            top_k=usual.top_k,
            do_sample=temperature > 0,
        )


class SavedPolicy:
    """A policy that was saved, with its tokenizer and the rewards of its run.

    `engine_name` is the rollout engine. It is started when the first prompt is answered, for prompts as long as those
    that were read by then.
    """

    def __init__(self, origin: Origin, sampling: SamplingParams, engine_name: str = "native") -> None:
        self.origin = origin
        self.sampling = sampling
        self.engine_name = engine_name
        model = origin.config.actor_rollout_ref.model
        has_tokenizer = (Path(origin.model) / "tokenizer_config.json").exists()
        path = origin.model if has_tokenizer else model.tokenizer_path or origin.model
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(path, trust_remote_code=model.trust_remote_code)
        known = int(self.tokenizer.model_max_length)
        self.longest_prompt = known if known < 1 << 20 else LONGEST_PROMPT
        self._longest_read = 1
        self._engine: RolloutEngine | None = None
        self._rules = make_reward_manager(origin.config, self.tokenizer, num_examine=0)

    @classmethod
    def open(cls, model: str, step: int | None, sampling: SamplingOptions, engine_name: str = "native") -> Self:
        """The policy that `model` and `step` mean: see `find_model`."""
        origin = find_model(model, step)
        if engine_name == "vllm" and (Path(origin.model) / ADAPTER_CONFIG).is_file():
            raise ConfigError(
                f"{origin.model} is an adapter of LoRA, and vLLM reads whole models here. Write one by `paceline "
                "export`, and give its folder; or use the native engine."
            )
        return cls(origin, sampling.params(origin), engine_name)

    def read_data(self, files: str | Sequence[str], limit: int = -1) -> list[Columns]:
        """The first rows of data files, as the trainer has them, without padding; -1 is all."""
        data = replace(
            self.origin.config.data, max_prompt_length=self.longest_prompt, return_raw_chat=False, cache_dir=""
        )
        names = files if isinstance(files, str) else list(files)
        dataset = RLHFDataset(names, self.tokenizer, data, max_samples=limit)
        rows = [_without_padding(dataset[index]) for index in range(len(dataset))]
        self._longest_read = max([self._longest_read, *(len(row["input_ids"]) for row in rows)])
        return rows

    def read_prompt(self, text: str) -> Columns:
        """A row of a prompt that goes through the chat template, if there is one, as a user's message."""
        tokenizer = self.tokenizer
        if tokenizer.chat_template is not None:
            chat = [{"role": "user", "content": text}]
            kwargs = self.origin.config.data.apply_chat_template_kwargs
            text = str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **kwargs))
        ids = tokenizer(text, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
        if not 0 < len(ids) <= self.longest_prompt:
            raise DataError(f"--prompt has {len(ids)} tokens; the model takes 1 to {self.longest_prompt}.")
        self._longest_read = max(self._longest_read, len(ids))
        return {
            "input_ids": torch.tensor(ids),
            "attention_mask": torch.ones(len(ids), dtype=torch.int64),
            "position_ids": torch.arange(len(ids)),
        }

    def answer(self, rows: Sequence[Columns], *, n: int, seed: int, first_row: int = 0) -> DataProto:
        """n responses to each row, with its labels. Seeds go by the place of a row, counted from `first_row`."""
        width = max(len(row["input_ids"]) for row in rows)
        prompts = collate_fn([_padded(row, width, self.tokenizer.pad_token_id) for row in rows])
        requests, labels = make_requests(prompts, n=n, seed=seed, purpose="rollout", step=0, first_row=first_row)
        assert requests.batch is not None
        if self._engine is None:
            self._engine = self.start_engine(self._longest_read)
        seeds = requests.batch["seeds"].tolist()
        completions = self._engine.generate(prompt_token_lists(requests), self.sampling, seeds)
        return labels.union(to_batch(requests, completions, self.sampling.max_tokens, self.tokenizer.pad_token_id))

    def start_engine(self, longest_prompt: int) -> RolloutEngine:
        """The rollout engine with these weights, for prompts of up to so many tokens."""
        config, device = self.origin.config, detect_device()
        model = replace(config.actor_rollout_ref.model, path=self.origin.model)
        return get_rollout(self.engine_name).from_spec(
            RolloutSpec(
                model=model,
                module=lambda: _read(config, model).to(device),  # type: ignore[arg-type]  # its decorator hides its arguments
                config=replace(config.actor_rollout_ref.rollout, load_format="auto"),
                max_prompt_length=longest_prompt,
                max_response_length=self.sampling.max_tokens,
                eos_token_ids=frozenset({self.tokenizer.eos_token_id} - {None}),
                pad_token_id=self.tokenizer.pad_token_id,
                device=device,
            )
        )

    def grade(self, batch: DataProto) -> list[Row]:
        """A row for each response, as in samples/<step>.jsonl; `score` is None where no rule grades the row."""
        assert batch.batch is not None
        key = self.origin.config.data.reward_fn_key
        columns = batch.non_tensor_batch
        labels = [columns.get(name, [None] * len(batch)) for name in (key, "reward_model")]
        graded = np.array([self._rules.has_rule(source, truth) for source, truth in zip(*labels, strict=True)])
        tokens = batch.batch["response_mask"].sum(dim=-1).tolist()
        nothing = torch.zeros(batch.batch["responses"].shape)
        rows = generation_rows(batch, self.tokenizer, step=0, scores=nothing, reward_fn_key=key)
        if graded.any():
            known = self._rules(batch[graded], return_dict=True)
            assert isinstance(known, dict)
            scored = iter(
                generation_rows(
                    batch[graded],
                    self.tokenizer,
                    step=0,
                    scores=known["reward_tensor"],
                    info=known["reward_extra_info"],
                    reward_fn_key=key,
                )
            )
            rows = [next(scored) if has_rule else row for row, has_rule in zip(rows, graded, strict=True)]
        for row, has_rule, count in zip(rows, graded, tokens, strict=True):
            del row["step"]
            row["tokens"] = count
            if not has_rule:
                row["score"] = None
        return rows


def find_model(model: str, step: int | None) -> Origin:
    """The weights that `--model` and `--step` mean: a model folder, a hub id, a run's folder or one of its checkpoints.

    Step 0 of a run is the model that it began with; no step is its latest whole checkpoint. A checkpoint is verified.
    """
    folder = Path(model).expanduser()
    if folder.name.startswith(CHECKPOINT_PREFIX) and (folder / ACTOR).is_dir():
        if step not in (None, step_of(folder)):
            raise ConfigError(f"--step {step} is not the step of --model {model}. Give the run's folder, or no --step.")
        run_dir = folder.parent.parent
        config = _config_of(run_dir)
        return Origin(str(first_whole_part([folder], ACTOR)), config, run_dir, step_of(folder))
    if (folder / CHECKPOINTS_FOLDER).is_dir() or (folder / METRICS_FILE).is_file():
        run_dir = folder
    elif step is not None:
        raise ConfigError(f"--step {step} asks for a checkpoint, but --model {model} is not a folder of a run.")
    else:
        return Origin(str(folder) if folder.exists() else model, PPOConfig())
    config = _config_of(run_dir)
    if step == 0:
        if config.actor_rollout_ref.model.path is None:
            raise ConfigError(
                f"--step 0 asks for the model that {run_dir} began with, and its {CONFIG_FILE} names none."
            )
        return Origin(config.actor_rollout_ref.model.path, config, run_dir, step=0)
    steps = _saved_actors(run_dir)
    if not steps or (step is not None and step not in steps):
        raise ConfigError(
            f"{run_dir} has {f'no checkpoint of step {step}' if step is not None else 'no checkpoint'}; it has "
            f"{', '.join(map(str, steps)) or 'none'}. trainer.save_freq saves them; --step 0 is the first model."
        )
    part = find_part(run_dir / CHECKPOINTS_FOLDER, ACTOR, step)
    refuse_reward_model(part)
    return Origin(str(part), config, run_dir, step_of(part.parent))


def _config_of(run_dir: Path) -> PPOConfig:
    """The configuration of a run; the defaults where the run left none."""
    saved = run_dir / CONFIG_FILE
    if not saved.is_file():
        return PPOConfig()
    tree = read_saved(saved)
    reading = read_policy_config(tree)  # most problems are no reason to stop: the run may be of another version
    hidden = (
        f"{key} is {MASK} in {saved}: a run saves its configuration without secrets, and its reward wants the value. "
        "Write ${oc.env:NAME} there instead, and set the environment variable NAME to the value."
        for key in _hidden_keys("", OmegaConf.to_container(tree, resolve=False))
        if key.startswith(SECRETS_OF_SCORES)
    )
    unread = (text for key, text in reading.problems.items() if key.startswith(SECRETS_OF_SCORES))
    wrong = [*hidden, *unread]
    try:  # what it registers scores, and may sample
        import_external(reading.cfg.actor_rollout_ref.model.external_lib)
    except ConfigError as error:
        wrong += [f"{saved}: {problem}" for problem in error.problems]
    if wrong:
        raise ConfigError(wrong)
    return reading.cfg


def _hidden_keys(key: str, value: object) -> Iterator[str]:
    """Full names of the values that were masked when they were saved."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _hidden_keys(f"{key}.{name}".lstrip("."), item)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _hidden_keys(f"{key}[{number}]", item)
    elif isinstance(value, str) and MASK in value:
        yield key


def _saved_actors(run_dir: Path) -> list[int]:
    """Steps whose policy was saved; a run with LoRA saves the adapter alone."""
    return [
        step
        for step, folder in list_checkpoints(run_dir / CHECKPOINTS_FOLDER).items()
        if any((folder / ACTOR / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    ]


def _without_padding(row: Columns) -> Columns:
    count = int(row["attention_mask"].sum())
    # Copies: a slice alone would keep all of the padding in memory.
    return row | {name: row[name][-count:].clone() for name in ("input_ids", "attention_mask", "position_ids")}


def _padded(row: Columns, width: int, pad_token_id: int) -> Columns:
    """The row with `width` tokens, filled up on the left."""
    fill = {"input_ids": pad_token_id, "attention_mask": 0, "position_ids": 0}
    missing = width - len(row["input_ids"])
    return row | {name: pad(row[name], (missing, 0), value=value) for name, value in fill.items()}


def _read(config: PPOConfig, model: PolicyModelConfig) -> PreTrainedModel:
    """The model; that of a run with LoRA is merged with its adapter."""
    folder = Path(str(model.path))
    if not (folder / ADAPTER_CONFIG).is_file():
        return build_model(model, "causal_lm", train=False)
    if config.actor_rollout_ref.model.path is None:
        raise ConfigError(
            f"{folder} is an adapter of LoRA, and no config.yaml of its run says which model it belongs to. Give the "
            "run's folder, or one that `paceline export` wrote."
        )
    return merged_policy(config, folder)
