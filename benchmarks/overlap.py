"""How close a split run comes to its critical path, with `trainer.overlap` full, updates and none.

One configuration of PPO with reference and reward model on two devices, in turns. The critical path of a step is
computed from the durations of its own calls: what must wait for what, and for its turn on the pool, with nothing lost
in between. Printed: seconds of a step and its ratio to that critical path, how long each call took, and which calls
really ran at the same time; all of them medians over steps without the first, the last two without the last step, too.

    python -m benchmarks.overlap
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from omegaconf import OmegaConf
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from benchmarks.table import report
from paceline.cli.quickstart.model import build_tokenizer
from paceline.report.timeline import Span, read_events
from paceline.trainer.main_ppo import run_ppo

OVERLAPS = ("full", "updates", "none")
Durations = Mapping[str, float]
PHASES = {
    "generate_sequences": "rollout",
    "compute_log_prob": "log-probs",
    "compute_ref_log_prob": "reference",
    "compute_values": "values",
    "compute_rm_score": "reward model",
    "compute_reward": "rules",
    "update_actor": "actor's update",
    "update_critic": "critic's update",
}


def make_material(folder: Path, hidden: int) -> None:
    """A random policy, a random reward model, and sums that are scored by rule and by the model."""
    tokenizer = build_tokenizer()
    shape = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        num_labels=1,
    )
    torch.manual_seed(0)
    for name, model in {"policy": Qwen2ForCausalLM(shape), "judge": Qwen2ForSequenceClassification(shape)}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{number}+{number}="}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
        }
        for number in range(256)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")


def run(
    folder: Path,
    name: str,
    steps: int,
    responses: int,
    tokens: int,
    *,
    ignore_eos: bool = True,
    places: int = 256,
    changes: Sequence[str] = (),
    **trainer: object,
) -> Path:
    """Train for some steps, split unless `trainer` has other keys; gives the folder of the run.

    The rollout decodes as many responses together as there are `places`. `changes` are further `key=value`.
    """
    config = {
        "data": {
            "train_files": str(folder / "train.parquet"),
            "train_batch_size": responses,
            "max_prompt_length": 16,
            "max_response_length": tokens,
        },
        "actor_rollout_ref": {
            "model": {"path": str(folder / "policy")},
            "actor": {
                "strategy": "local",
                "ppo_mini_batch_size": responses // 2,
                "ppo_micro_batch_size_per_gpu": 16,
                "use_kl_loss": True,
            },
            "rollout": {"ignore_eos": ignore_eos, "max_num_seqs": places},
        },
        # Two passes, so that the critic's update is still at work when the next rollout begins.
        "critic": {"strategy": "local", "ppo_micro_batch_size_per_gpu": 16, "ppo_epochs": 2},
        "reward_model": {
            "enable": True,
            "strategy": "local",
            "model": {"path": str(folder / "judge")},
            "weights": {"openai/gsm8k": {"rule": 1.0, "model": 0.1}},
        },
        "trainer": {
            "device": "cpu",
            "n_gpus_per_node": 2,
            "threads_per_worker": 1,
            "placement": {"name": "split"},
            "total_training_steps": steps,
            "log_train_samples": 0,
            "logger": [],
            "default_local_dir": str(folder / name),
            **trainer,
        },
    }
    run_ppo(OmegaConf.merge(config, OmegaConf.from_dotlist(list(changes))))
    return folder / name


def calls_of(run_dir: Path) -> dict[int, dict[str, Span]]:
    """By step and method: when the call ran."""
    calls: dict[int, dict[str, Span]] = {}
    for event in read_events(run_dir / "timeline.json"):
        if event["name"] in PHASES and event["args"].get("step", 0) > 0:
            start = event["ts"] / 1e6
            calls.setdefault(event["args"]["step"], {})[event["name"]] = (start, start + event["dur"] / 1e6)
    return calls


def step_seconds(calls: Mapping[int, Mapping[str, Span]]) -> list[float]:
    """From the start of a rollout to the start of the next, without the first step."""
    starts = [calls[step]["generate_sequences"][0] for step in sorted(calls)]
    return [later - earlier for earlier, later in pairwise(starts[1:])]


def critical_path(steps: list[Durations]) -> list[float]:
    """Seconds from rollout to rollout if every call began the moment that its inputs and its pool were free.

    >>> one = {"generate_sequences": 2.0, "compute_values": 1.0, "update_actor": 3.0, "update_critic": 4.0}
    >>> critical_path([one, one, one])
    [6.0, 6.0]
    """
    actor_free = critic_free = 0.0
    starts = []
    for duration in steps:
        starts.append(actor_free)
        sampled = actor_free + duration["generate_sequences"]
        actor_free = sampled + duration.get("compute_log_prob", 0.0) + duration.get("compute_ref_log_prob", 0.0)
        critic_free = max(critic_free, sampled) + duration["compute_values"] + duration.get("compute_rm_score", 0.0)
        ready = max(actor_free, critic_free, sampled + duration.get("compute_reward", 0.0))
        actor_free, critic_free = ready + duration["update_actor"], ready + duration["update_critic"]
    return [later - earlier for earlier, later in pairwise(starts)]


def inner_steps(calls: Mapping[int, Mapping[str, Span]]) -> list[int]:
    """All but the first, which warms up, and the last, which no rollout follows."""
    return sorted(calls)[1:-1]


def median_durations(calls: Mapping[int, Mapping[str, Span]]) -> dict[str, float]:
    """Seconds of each call. Of the same steps as `overlaps`, so that no two calls share more than either has."""
    steps = [calls[step] for step in inner_steps(calls)]
    return {
        phase: statistics.median(step[method][1] - step[method][0] for step in steps)
        for method, phase in PHASES.items()
    }


def overlaps(calls: Mapping[int, Mapping[str, Span]]) -> dict[tuple[str, str], float]:
    """Seconds of a step (median) in which two calls ran at the same time; a call of the next step is marked with +1."""
    together: dict[tuple[str, str], list[float]] = {}
    for step in inner_steps(calls):
        named = {phase: calls[step][method] for method, phase in PHASES.items()}
        named["rollout +1"] = calls[step + 1]["generate_sequences"]
        for (first, a), (second, b) in combinations(named.items(), 2):
            shared = min(a[1], b[1]) - max(a[0], b[0])
            together.setdefault((first, second), []).append(max(shared, 0.0))
    medians = {pair: statistics.median(seconds) for pair, seconds in together.items()}
    return {pair: seconds for pair, seconds in medians.items() if seconds > 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="of each run; the first is not counted")
    parser.add_argument("--responses", type=int, default=64, help="per step")
    parser.add_argument("--tokens", type=int, default=192, help="per response")
    parser.add_argument("--hidden", type=int, default=320, help="width of the models")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each")
    arguments = parser.parse_args()
    walls: dict[str, list[float]] = {overlap: [] for overlap in OVERLAPS}
    paths: dict[str, list[float]] = {overlap: [] for overlap in OVERLAPS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_material(folder, arguments.hidden)
        sizes = (arguments.steps, arguments.responses, arguments.tokens)
        for turn in range(arguments.rounds):
            for overlap in OVERLAPS if turn % 2 else OVERLAPS[::-1]:
                calls = calls_of(run(folder, f"{overlap}{turn}", *sizes, overlap=overlap))
                durations = [
                    {name: end - start for name, (start, end) in calls[step].items()} for step in sorted(calls)
                ]
                walls[overlap] += step_seconds(calls)
                paths[overlap] += critical_path(durations)[1:]
                if overlap == "full":
                    typical = calls
    report("split step by trainer.overlap", walls, "s", of="full")
    ratios = {
        overlap: [wall / path for wall, path in zip(walls[overlap], paths[overlap], strict=True)]
        for overlap in OVERLAPS
    }
    report("split step / its critical path", ratios, "ratio", of="full")
    print("\nseconds of each call (median):")
    for phase, seconds in median_durations(typical).items():
        print(f"  {phase:<18}{seconds:>6.2f}")
    print("\nat the same time with overlap=full (seconds of a step, median):")
    for (first, second), seconds in sorted(overlaps(typical).items(), key=lambda item: -item[1]):
        print(f"  {first:<18}{second:<18}{seconds:>6.2f}")


if __name__ == "__main__":
    main()
