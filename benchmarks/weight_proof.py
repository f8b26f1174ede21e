"""What the proof of weights costs: seconds of a weight sync with and without it, beside a training step.

A small model, one thread: a step is the sampling of responses and one optimizer step on them, a sync is what a rollout
with weights of its own takes after each step. All are measured in turns.

    python -m benchmarks.weight_proof
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from benchmarks.table import remark, report
from benchmarks.timing import take_turns
from benchmarks.update import PAD, make_engine, save_model
from paceline.protocol import DataProto
from paceline.rollout import SamplingParams
from paceline.rollout.native import NativeRollout
from paceline.rollout.postprocess import to_batch
from paceline.workers.weight_sync import WeightSync

PROMPT, VOCABULARY = 32, 8000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256, help="width of the model (256)")
    parser.add_argument("--layers", type=int, default=6, help="its layers (6)")
    parser.add_argument("--rows", type=int, default=64, help="responses of a step (64)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a response (64)")
    parser.add_argument("--repeats", type=int, default=5, help="how often each is measured (5)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, hidden=args.hidden, layers=args.layers, vocabulary=VOCABULARY)
        engine = make_engine(folder, packed=True)
        rollout = NativeRollout(AutoModelForCausalLM.from_pretrained(folder), set(), PAD)
    size = sum(tensor.nbytes for _, tensor in engine.named_full_weights())
    prompts = torch.randint(1, VOCABULARY, (args.rows, PROMPT), generator=torch.Generator().manual_seed(0))
    requests = DataProto.from_dict({"input_ids": prompts, "attention_mask": torch.ones_like(prompts)})
    sync = WeightSync(rollout, "stop")

    def step() -> None:
        completions = rollout.generate(
            prompts.tolist(), SamplingParams(args.tokens, ignore_eos=True), list(range(args.rows))
        )
        batch = to_batch(requests, completions, args.tokens, PAD)

        def loss(
            output: dict[str, torch.Tensor], micro_batch: TensorDict
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return -output["log_probs"].sum() / (args.rows * args.tokens), {}

        engine.train_batch(batch, loss, max_tokens=8192)

    ways = {
        "step": step,
        "sync without proof": lambda: rollout.update_weights(engine.named_full_weights()),
        "sync with proof": lambda: sync.bring(engine.named_full_weights, None, "recompute"),
    }
    measured = take_turns(ways, args.repeats)
    work = f"weights of {size / 1e6:.0f} MB, {args.rows} responses of {args.tokens} tokens"
    report(work, measured, "s", of="step")
    whole, without, with_proof = (statistics.median(measured[name]) for name in ways)
    remark(f"The proof of weights takes {(with_proof - without) / whole:.2%} of a step.")


if __name__ == "__main__":
    main()
