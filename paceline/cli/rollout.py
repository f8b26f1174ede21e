"""`paceline rollout`: responses of a model, or of a checkpoint of a run, with their scores. No Ray."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.parser import make_parser
from paceline.run_folder import (
    ACTOR,
    CHECKPOINT_PREFIX,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    METRICS_FILE,
    list_checkpoints,
    step_of,
)

if TYPE_CHECKING:
    from paceline.config import PolicyModelConfig, PPOConfig
    from paceline.protocol import DataProto

EXAMPLES = (
    "--model ~/models/qwen --prompt 'What is 12+7?'",
    "--model runs/paceline/ppo --data test.parquet --limit 20",
    "--model runs/paceline/ppo --step 40 --data test.parquet -n 4 --temperature 0.7 --output samples.jsonl",
    "--model runs/paceline/ppo --step 0 --data test.parquet --temperature 0      what the run began with, greedily",
)

SECRETS_OF_SCORES = ("custom_reward_function.reward_kwargs", "reward_model.sandbox.url")
"""Keys of a run whose values may be secrets, or hold some, and are needed to score."""


@dataclass(frozen=True)
class Origin:
    """Where the weights are, and the configuration of the run that they come from; the defaults without a run."""

    model: str
    config: PPOConfig
    is_run: bool


def main(argv: Sequence[str]) -> int:
    """Sample and print. Gives the exit code."""
    arguments = _parser().parse_args(argv)

    from paceline.trainer.main_ppo import errors_as_exit_codes

    with errors_as_exit_codes():
        run(arguments)
    return 0


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Sample and print; gives the rows that were printed."""
    from paceline.data.tokenizer import load_tokenizer
    from paceline.errors import ConfigError
    from paceline.report.json_lines import json_line

    origin = find_model(arguments.model, arguments.step)
    if arguments.output and not arguments.output.parent.is_dir():
        raise ConfigError(f"--output {arguments.output}: there is no folder {arguments.output.parent}.")
    if arguments.output and arguments.output.is_dir():
        raise ConfigError(f"--output {arguments.output} is a folder. Give a file in it.")
    model = origin.config.actor_rollout_ref.model
    has_tokenizer = (Path(origin.model) / "tokenizer_config.json").exists()
    tokenizer_path = origin.model if has_tokenizer else model.tokenizer_path or origin.model
    tokenizer = load_tokenizer(tokenizer_path, trust_remote_code=model.trust_remote_code)
    prompts = read_prompts(arguments, origin.config, tokenizer)
    start = time.monotonic()
    batch = sample(arguments, origin, prompts, tokenizer)
    seconds = time.monotonic() - start
    rows = score(origin.config, batch, tokenizer)
    for number, row in enumerate(rows):
        print(_as_text(row, number, arguments.n))
    print(_summary(rows, seconds))
    if arguments.output:
        arguments.output.write_bytes(b"".join(map(json_line, rows)))
    return rows


def find_model(model: str, step: int | None) -> Origin:
    """The weights that `--model` and `--step` mean: a model folder, a hub id, a run's folder or one of its checkpoints.

    Step 0 of a run is the model that it began with; no step is its latest whole checkpoint. A checkpoint is verified.
    """
    from paceline.config import PPOConfig
    from paceline.errors import ConfigError
    from paceline.trainer.ppo.checkpoint import find_part, first_whole_part

    folder = Path(model).expanduser()
    if folder.name.startswith(CHECKPOINT_PREFIX) and (folder / ACTOR).is_dir():
        if step not in (None, step_of(folder)):
            raise ConfigError(f"--step {step} is not the step of --model {model}. Give the run's folder, or no --step.")
        config = _config_of(folder.parent.parent)
        return Origin(str(first_whole_part([folder], ACTOR)), config, is_run=True)
    if (folder / CHECKPOINTS_FOLDER).is_dir() or (folder / METRICS_FILE).is_file():
        run_dir = folder
    elif step is not None:
        raise ConfigError(f"--step {step} asks for a checkpoint, but --model {model} is no folder of a run.")
    else:
        return Origin(str(folder) if folder.exists() else model, PPOConfig(), is_run=False)
    config = _config_of(run_dir)
    if step == 0:
        if config.actor_rollout_ref.model.path is None:
            raise ConfigError(
                f"--step 0 asks for the model that {run_dir} began with, and its {CONFIG_FILE} names none."
            )
        return Origin(config.actor_rollout_ref.model.path, config, is_run=True)
    steps = _saved_actors(run_dir)
    if not steps or (step is not None and step not in steps):
        raise ConfigError(
            f"{run_dir} has {f'no checkpoint of step {step}' if step is not None else 'no checkpoint'}; it has "
            f"{', '.join(map(str, steps)) or 'none'}. trainer.save_freq saves them; --step 0 is the first model."
        )
    return Origin(str(find_part(run_dir / CHECKPOINTS_FOLDER, ACTOR, step)), config, is_run=True)


def _config_of(run_dir: Path) -> PPOConfig:
    """The configuration of a run; the defaults where the run left none."""
    from omegaconf import OmegaConf

    from paceline.config import PPOConfig
    from paceline.config.load import read_config, read_saved
    from paceline.errors import ConfigError
    from paceline.redaction import MASK

    saved = run_dir / CONFIG_FILE
    if not saved.is_file():
        return PPOConfig()
    tree = read_saved(saved)
    config, problems = read_config(tree)  # most are no reason to stop: the run may be of another version
    hidden = (
        f"{key} is {MASK} in {saved}: a run saves its configuration without secrets, and its reward wants the value. "
        "Write ${oc.env:NAME} there instead, and set the environment variable NAME to the value."
        for key in _hidden_keys("", OmegaConf.to_container(tree, resolve=False))
        if key.startswith(SECRETS_OF_SCORES)
    )
    unread = (text for key, text in problems.items() if key.startswith(SECRETS_OF_SCORES))
    if wrong := [*hidden, *unread]:
        raise ConfigError(wrong)
    return config


def _hidden_keys(key: str, value: Any) -> Iterator[str]:
    """Full names of the values that were masked when they were saved."""
    from paceline.redaction import MASK

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
    from paceline.engine.lora import ADAPTER_CONFIG

    return [
        step
        for step, folder in list_checkpoints(run_dir / CHECKPOINTS_FOLDER).items()
        if any((folder / ACTOR / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    ]


def read_prompts(arguments: argparse.Namespace, config: PPOConfig, tokenizer: Any) -> dict[str, Any]:
    """The prompts as collated rows, as the trainer has them; a --prompt goes through the chat template, if any."""
    from paceline.data.rl_dataset import RLHFDataset, collate_fn

    longest = int(tokenizer.model_max_length) if tokenizer.model_max_length < 1 << 20 else 1 << 15
    data = replace(config.data, max_prompt_length=longest, return_raw_chat=False, cache_dir="")
    if arguments.data:
        dataset = RLHFDataset(arguments.data, tokenizer, data, max_samples=arguments.limit)
        rows = [_without_padding(dataset[index]) for index in range(len(dataset))]
    else:
        rows = [_row(text, tokenizer, longest) for text in arguments.prompt]
    width = max(len(row["input_ids"]) for row in rows)
    return collate_fn([_padded(row, width, tokenizer.pad_token_id) for row in rows])


def _without_padding(row: dict[str, Any]) -> dict[str, Any]:
    count = int(row["attention_mask"].sum())
    # Copies: a slice alone would keep all of the padding in memory.
    return row | {name: row[name][-count:].clone() for name in ("input_ids", "attention_mask", "position_ids")}


def _padded(row: dict[str, Any], width: int, pad_token_id: int) -> dict[str, Any]:
    """The row with `width` tokens, filled up on the left."""
    from torch.nn.functional import pad

    fill = {"input_ids": pad_token_id, "attention_mask": 0, "position_ids": 0}
    missing = width - len(row["input_ids"])
    return row | {name: pad(row[name], (missing, 0), value=value) for name, value in fill.items()}


def _row(text: str, tokenizer: Any, longest: int) -> dict[str, Any]:
    """A prompt of the command line, without padding."""
    import torch

    from paceline.errors import DataError

    if tokenizer.chat_template is not None:
        chat = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
    if not 0 < len(ids) <= longest:
        raise DataError(f"--prompt has {len(ids)} tokens; the model takes 1 to {longest}.")
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.ones(len(ids), dtype=torch.int64),
        "position_ids": torch.arange(len(ids)),
    }


def sample(arguments: argparse.Namespace, origin: Origin, prompts: dict[str, Any], tokenizer: Any) -> DataProto:
    """n responses to each prompt, with the labels of its row."""
    from paceline.rollout.postprocess import prompt_token_lists, to_batch
    from paceline.rollout.rollout_interface import RolloutSpec, SamplingParams, get_rollout
    from paceline.trainer.device import detect_device
    from paceline.trainer.ppo.phases import make_requests

    config, device = origin.config, detect_device()
    model = replace(config.actor_rollout_ref.model, path=origin.model)
    usual = config.actor_rollout_ref.rollout
    temperature = usual.temperature if arguments.temperature is None else arguments.temperature
    max_tokens = arguments.max_tokens or (config.data.max_response_length if origin.is_run else 256)
    engine = get_rollout("native").from_spec(
        RolloutSpec(
            model=model,
            module=lambda: _read(origin.config, model).to(device),
            config=usual,
            max_prompt_length=prompts["input_ids"].shape[-1],
            max_response_length=max_tokens,
            eos_token_ids=frozenset({tokenizer.eos_token_id} - {None}),
            pad_token_id=tokenizer.pad_token_id,
            device=device,
        )
    )
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature or 1.0,
        top_p=usual.top_p if arguments.top_p is None else arguments.top_p,
        top_k=usual.top_k,
        do_sample=temperature > 0,
    )
    requests, labels = make_requests(prompts, n=arguments.n, seed=arguments.seed, purpose="rollout", step=0)
    completions = engine.generate(prompt_token_lists(requests), sampling, requests.batch["seeds"].tolist())
    return labels.union(to_batch(requests, completions, max_tokens, tokenizer.pad_token_id))


def _read(config: PPOConfig, model: PolicyModelConfig) -> Any:
    """The model; that of a run with LoRA is merged with its adapter."""
    from paceline.engine.hf_models import build_model
    from paceline.engine.lora import ADAPTER_CONFIG
    from paceline.errors import ConfigError
    from paceline.trainer.export import merged_policy

    folder = Path(str(model.path))
    if not (folder / ADAPTER_CONFIG).is_file():
        return build_model(model, "causal_lm", train=False)
    if config.actor_rollout_ref.model.path is None:
        raise ConfigError(
            f"{folder} is an adapter of LoRA, and no config.yaml of its run says which model it belongs to. Give the "
            "run's folder, or one that `paceline export` wrote."
        )
    return merged_policy(config, folder)


def score(config: PPOConfig, batch: DataProto, tokenizer: Any) -> list[dict[str, Any]]:
    """A row for each response, as in samples/<step>.jsonl; `score` is None where no rule grades the row."""
    import numpy as np
    import torch

    from paceline.report.dumps import generation_rows
    from paceline.rewards import make_reward_manager

    rules = make_reward_manager(config, tokenizer, num_examine=0)
    columns = batch.non_tensor_batch
    labels = [columns.get(name, [None] * len(batch)) for name in (config.data.reward_fn_key, "reward_model")]
    graded = np.array([rules.has_rule(source, truth) for source, truth in zip(*labels, strict=True)])
    nothing = torch.zeros(batch.batch["responses"].shape)
    rows = generation_rows(batch, tokenizer, step=0, scores=nothing, reward_fn_key=config.data.reward_fn_key)
    results = rules(batch[graded], return_dict=True) if graded.any() else None
    scores = iter(results["reward_tensor"].sum(dim=-1).tolist() if results else ())
    tokens = batch.batch["response_mask"].sum(dim=-1).tolist()
    for row, has_rule, count in zip(rows, graded, tokens, strict=True):
        del row["step"]
        row |= {"score": next(scores) if has_rule else None, "tokens": count}
    return rows


def _as_text(row: dict[str, Any], number: int, n: int) -> str:
    score = "no rule" if row["score"] is None else f"score {row['score']:g}"
    truth = "" if row["ground_truth"] is None else f", ground truth {str(row['ground_truth'])[:200]}"
    head = f"[{number // n + 1}] {row['prompt'].rstrip()}\n" if number % n == 0 else ""
    return f"{head}--- {number % n + 1}/{n}, {row['tokens']} tokens, {score}{truth}\n{row['response']}\n"


def _summary(rows: list[dict[str, Any]], seconds: float) -> str:
    scores = [row["score"] for row in rows if row["score"] is not None]
    tokens = sum(row["tokens"] for row in rows)
    mean = f"mean score {sum(scores) / len(scores):.4g} of {len(scores)} graded, " if scores else ""
    return f"{len(rows)} responses, {mean}{tokens} tokens in {seconds:.1f} s with the loading of the model"


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "rollout", "Sample from a model or a checkpoint of a run, and score where the data have a rule.", EXAMPLES
    )
    parser.add_argument("--model", required=True, metavar="DIR_OR_RUN", help="a model, a hub id, a run or a checkpoint")
    parser.add_argument("--step", type=int, help="of a run: the checkpoint, or 0: the model it began with (latest)")
    origin = parser.add_mutually_exclusive_group(required=True)
    origin.add_argument("--data", metavar="FILE.parquet", help="prompts as for training")
    origin.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may come several times")
    parser.add_argument("--limit", type=_at_least_one, default=8, help="prompts of the data to use (8)")
    parser.add_argument("-n", type=_at_least_one, default=1, help="responses to each prompt (1)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (the run's, or 1)")
    parser.add_argument("--top-p", type=float, help="(the run's, or 1)")
    parser.add_argument("--max-tokens", type=_at_least_one, help="longest response (the run's, or 256)")
    parser.add_argument("--seed", type=int, default=0, help="one seed, one result (0)")
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="also write a line for each response")
    return parser


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number
