"""A real model of 135 million parameters: its rollout, its update, a PPO step, and the memory that the step takes.

SmolLM2-135M-Instruct on word problems, float32, two threads; `make bench-peers` makes both, and without them nothing is
measured. Rollout: 8 problems, 4 responses of 48 tokens to each, by the native engine, vLLM and `transformers.generate`.
Update: 8 of the problems with such responses, in packed micro-batches and in padded rows. PPO step: 8 problems, actor,
critic, reference and a reward model of that size, tuned by hand as in `benchmarks.ppo_step` and with nothing set but
what is asked, in slices; and the most memory that the worker process of each has held, actor and critic in it.

    python -m benchmarks.smollm2
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from benchmarks import rollout, update
from benchmarks.ppo_step import by_hand, what_is_asked
from benchmarks.step_runs import PEERS, STEPS_TO_THE_SLOWEST, StepBenchmark
from benchmarks.table import remark, report
from benchmarks.timing import take_turns
from paceline.data.tokenizer import load_tokenizer
from paceline.machine import keep_freed_memory
from paceline.rollout.native import NativeRollout
from paceline.trainer.main_ppo import run_ppo

FOLDER = PEERS / "smollm2"
MODEL = "SmolLM2-135M"
PROBLEMS = 8
SAMPLES = 4
RESPONSE_TOKENS = 48
MOST_PROMPT_TOKENS = 128
LENGTHS = {
    "data": {"max_prompt_length": MOST_PROMPT_TOKENS, "max_response_length": RESPONSE_TOKENS},
    "actor_rollout_ref": {"rollout": {"ignore_eos": True}},
}
WORKLOAD = "equal"


def compare_rollout(args: argparse.Namespace) -> None:
    model = AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=torch.float32).eval()
    tokenizer = load_tokenizer(str(args.folder / "model"))
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    asked = pq.read_table(args.folder / "train.parquet").column("prompt").to_pylist()[:PROBLEMS]
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in asked
        for _ in range(SAMPLES)
    ]
    work = rollout.Workload(MODEL, prompts, [RESPONSE_TOKENS] * len(prompts), ignore_eos=True)
    samplers: dict[str, rollout.Sampler] = {
        "transformers": partial(rollout.sample_with_transformers, model),
        "native": partial(rollout.sample_with_engine, NativeRollout(model, {eos}, pad)),
    }
    if importlib.util.find_spec("vllm") is not None:
        vllm = rollout.start_vllm(model, 256, RESPONSE_TOKENS, longest_prompt=MOST_PROMPT_TOKENS, eos=eos, pad=pad)
        samplers["vllm"] = partial(rollout.sample_with_engine, vllm)
    ways = {name: partial(rollout.run, sampler, work) for name, sampler in samplers.items()}
    taken = take_turns(ways, args.repeats)
    speeds = {name: [sum(work.lengths) / value for value in seconds] for name, seconds in taken.items()}
    report(f"rollout, {MODEL}", speeds, "tokens/s", of="native")


def compare_update(args: argparse.Namespace) -> None:
    lengths = [(MOST_PROMPT_TOKENS - 8 * row, RESPONSE_TOKENS) for row in range(PROBLEMS)]
    ways = [way for way in update.WAYS if way.packed == way.by_tokens]
    engines = {way.packed: update.make_engine(str(args.folder / "model"), packed=way.packed) for way in ways}
    data = update.make_batch(lengths, engines[True].model.config.vocab_size)
    sizes = argparse.Namespace(micro_tokens=4096, micro_rows=PROBLEMS)
    taken = take_turns(
        {way.name: partial(update.update, engines[way.packed], data, way, sizes) for way in ways}, args.repeats
    )
    tokens = int(data.batch["attention_mask"].sum())
    speeds = {name: [tokens / value for value in seconds] for name, seconds in taken.items()}
    report(f"update, {MODEL}", speeds, "tokens/s", of=ways[-1].name)


def make_material(folder: Path, source: Path, prompts: int) -> None:
    """For `benchmarks.ppo_step`: the policy, a reward model with a random head, and the prompts."""
    (folder / "policy").symlink_to((source / "model").resolve())
    tokenizer = load_tokenizer(str(source / "model"))
    torch.manual_seed(0)
    judge = AutoModelForSequenceClassification.from_pretrained(source / "model", num_labels=1, dtype=torch.float32)
    judge.config.pad_token_id = tokenizer.pad_token_id
    judge.save_pretrained(folder / "judge")
    tokenizer.save_pretrained(folder / "judge")
    chats = pq.read_table(source / "train.parquet").column("prompt").to_pylist()
    rows = [
        {"data_source": "judged", "prompt": chats[number % len(chats)], "reward_model": {"style": "model"}}
        for number in range(prompts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{WORKLOAD}.parquet")


def run_paceline(material: Path, workload: str, prompts: int, threads: int, folder: Path) -> None:
    """The ordinary run, with all that makes it fast set by hand."""
    _run(material, workload, prompts, folder, by_hand(threads))


def run_with_defaults(material: Path, workload: str, prompts: int, threads: int, folder: Path) -> None:
    """The ordinary run with nothing set but what is asked."""
    _run(material, workload, prompts, folder, {})


def _run(material: Path, workload: str, prompts: int, folder: Path, settings: dict[str, object]) -> None:
    config = OmegaConf.merge(what_is_asked(material, workload, prompts, folder), LENGTHS, settings)
    assert isinstance(config, DictConfig)
    run_ppo(config)


BENCHMARK = StepBenchmark(
    f"PPO step of {MODEL}",
    "benchmarks.smollm2",
    {"paceline": run_paceline, "paceline, defaults": run_with_defaults},
)
PARTS = ("rollout", "update", "step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="what examples/smollm2_gsm8k/prepare.py wrote")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="all without")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each rollout and update (5)")
    parser.add_argument("--steps", type=int, default=4, help="of each run, behind its first (4)")
    parser.add_argument("--prompts", type=int, default=PROBLEMS, help=f"per step ({PROBLEMS})")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (2)")
    args = parser.parse_args()
    if not (args.folder / "model" / "config.json").exists():
        remark(f"{MODEL} is left out: `make bench-peers` makes its folder.")
        return
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as a run's workers do
    remark(f"{MODEL}: {args.threads} threads, {args.repeats} of each rollout and update in turns.")
    if "rollout" in args.parts:
        compare_rollout(args)
    if "update" in args.parts:
        compare_update(args)
    if "step" in args.parts:
        with tempfile.TemporaryDirectory() as name:
            make_material(Path(name), args.folder, args.prompts * STEPS_TO_THE_SLOWEST * (1 + args.steps))
            BENCHMARK.compare(WORKLOAD, Path(name), args)


if __name__ == "__main__":
    if not BENCHMARK.run_as_asked():
        main()
