"""Values of our own keys that people bring from verl: some mean something else here, some we do not have yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from paceline.config.dialect.rule_kinds import is_same
from paceline.config.keys import ACTOR, ROLLOUT, known_keys
from paceline.text import unknown_choice

Settings = dict[str, object]
Choice = tuple[str, object, Settings, str]

_USE_TENSORBOARD = "is not supported yet; use tensorboard, wandb or mlflow, and metrics.jsonl is always written."

REFUSED_CHOICES: dict[str, dict[str, str]] = {
    "trainer.device": {"gpu": "is not known; GPUs are cuda."},
    "trainer.logger": dict.fromkeys(("comet", "clearml", "vemlp_wandb", "rl_logging_board"), _USE_TENSORBOARD),
}
"""A key to the values that people know, each with what follows `key=value` in the message."""

_GREEDY: Settings = {f"{ROLLOUT}.val_kwargs.do_sample": False, f"{ROLLOUT}.val_kwargs.temperature": 1.0}
_MICRO_BATCHES = (
    f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size_per_gpu",
    "reward_model.micro_batch_size_per_gpu",
)


def _choice(key: str, asked: object, here: object, why: str = "") -> Choice:
    """A value of a key that is another value of it here."""
    return key, asked, {key: here}, why


CHOICES: list[Choice] = [
    _choice("algorithm.filter_groups.max_num_gen_batches", 0, -1, "no limit"),
    *[_choice(f"{ROLLOUT}.{key}", 0, -1, "no limit") for key in ("top_k", "val_kwargs.top_k")],
    (f"{ROLLOUT}.val_kwargs.temperature", 0, _GREEDY, "greedy"),
    *[_choice(f"{ROLLOUT}.load_format", name, "auto") for name in ("safetensors", "hf", "huggingface")],
    *[
        _choice(f"{ROLLOUT}.name", name, "vllm", f"{name} is not here, and vLLM samples the same way")
        for name in ("sglang", "trtllm")
    ],
    _choice("trainer.resume_from_path", False, None),
    *[
        _choice(key, None, known_keys()[key].default, "the default")
        for key in _MICRO_BATCHES
        if known_keys()[key].default
    ],
    *[_choice(f"{section}.optim.lr_warmup_steps", None, -1) for section in (ACTOR, "critic")],
]
"""A key, the value that verl's users give it, what that is here, and why."""


def read_choices(tree: Mapping[str, object]) -> list[Choice]:
    """The choices of the table that a configuration makes: key, value, what to set instead, why."""
    found = [choice for choice in CHOICES if _has(tree, choice[0], choice[1])]
    return [*found, *_loggers(tree)]


def _loggers(tree: Mapping[str, object]) -> Iterator[Choice]:
    trainer = tree.get("trainer")
    asked = trainer.get("logger") if isinstance(trainer, Mapping) else None
    names = [asked] if isinstance(asked, str) else asked
    if isinstance(names, list | tuple) and "file" in names:
        others = [name for name in names if name != "file"]
        yield "trainer.logger", asked, {"trainer.logger": others}, "metrics.jsonl is always written"


def _has(tree: Mapping[str, object], key: str, value: object) -> bool:
    node: object = tree
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return False
        node = node[name]
    return node is None if value is None else node is not None and is_same(node, value)


def refused_choice(key: str, asked: str, known: Iterable[str]) -> str:
    """What to say of a value that is none of the known ones: that it is not supported yet, or which is the nearest."""
    refused = REFUSED_CHOICES.get(key, {})
    return f"{key}={asked} {refused[asked]}" if asked in refused else unknown_choice(key, asked, known)
