"""Small real runs for the tests: data, overrides, and reading back what a run wrote."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.device import DEVICE, ON_CPU
from tests.tiny import make_tiny_model

DIGIT_REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits: a random model earns something at once, and can learn to earn more."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
'''


def write_sums(path: Path, rows: int, seed: int = 0, source: str = "openai/gsm8k") -> Path:
    """GSM8K-style rows that ask for sums."""
    generator = random.Random(seed)
    table = []
    for index in range(rows):
        a, b = generator.randint(0, 99), generator.randint(0, 99)
        table.append(
            {
                "data_source": source,
                "prompt": [{"role": "user", "content": f"{a}+{b}="}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"split": "train", "index": index},
            }
        )
    pq.write_table(pa.Table.from_pylist(table), path)
    return path


def make_material(folder: Path, rows: int = 20, hidden: int = 32, model_type: str = "qwen2") -> Path:
    """A folder with model, train.parquet (a number of rows that does not divide), test.parquet and reward.py."""
    make_tiny_model(folder / "model", hidden=hidden, model_type=model_type)
    write_sums(folder / "train.parquet", rows)
    write_sums(folder / "test.parquet", 6, seed=1)
    (folder / "reward.py").write_text(DIGIT_REWARD)
    return folder


def base_config(material: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Key -> value of a small PPO run; keyword names are keys with `.` written as `__`."""
    config: dict[str, Any] = {
        "actor_rollout_ref.model.path": str(material / "model"),
        "actor_rollout_ref.actor.strategy": "local",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "critic.strategy": "local",
        "critic.ppo_micro_batch_size_per_gpu": 4,
        "critic.optim.lr": 1e-3,
        "data.train_files": str(material / "train.parquet"),
        "data.val_files": str(material / "test.parquet"),
        "data.train_batch_size": 8,
        "data.max_prompt_length": 32,
        "data.max_response_length": 8,
        "custom_reward_function.path": str(material / "reward.py"),
        "trainer.total_training_steps": 4,
        "trainer.threads_per_worker": 1,
        # Most tests want neither, and both take time.
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.logger": ["console"],
        "trainer.default_local_dir": str(run_dir),
    }
    if not ON_CPU:
        config["trainer.device"] = DEVICE
    return config | {key.replace("__", "."): value for key, value in changes.items()}


def as_overrides(config: dict[str, Any]) -> list[str]:
    """For the command line."""
    return [
        f"{key}={'[' + ','.join(value) + ']' if isinstance(value, list) else value}" for key, value in config.items()
    ]


def as_omegaconf(config: dict[str, Any]) -> Any:
    """For `run_ppo`: a subset of the keys."""
    from omegaconf import OmegaConf

    result = OmegaConf.create({})
    for key, value in config.items():
        OmegaConf.update(result, key, value, force_add=True)
    return result


def heed_ctrl_c() -> None:
    """For `preexec_fn`: what starts in the background of a shell ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def results(run_dir: Path, *but: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock, and without names that begin as one of `but`."""
    left_out = ("timing_s/", "timing_per_token_ms/", "perf/", *but)
    return [
        {name: value for name, value in line.items() if not name.startswith(left_out)} for line in read_metrics(run_dir)
    ]
