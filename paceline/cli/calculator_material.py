"""What the recipe of an agent begins with: a model that knows nothing, and sums that are too hard for it, with a tool.

In some of the conversations to learn from the assistant calls a calculator and repeats what that says, in most it
answers at once. Copying is learned soon, adding numbers of three digits is not: so it will know how to call, seldom
do it, and be mostly wrong where it does not.
"""

from __future__ import annotations

import random
from pathlib import Path

from transformers import AddedToken

from paceline.cli.quickstart.model import build_model, build_tokenizer
from paceline.cli.quickstart.task import Sum, write_parquet
from paceline.cli.recipe_material import SEED, write_rows
from paceline.files import replacing_folder

CALL, CALL_END = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
"""A token each: so small a model has better things to learn than to spell them."""
TOOL = "<|tool|>"
SHARE_OF_CALLS = 0.2
NUM_CHATS, NUM_TRAINING, NUM_TEST = 6400, 4000, 200
TOOLS = "tools:\n  - class_name: paceline.agents.calculator.Calculator\n    config: {type: native}\n"


def make_calculator(folder: Path) -> None:
    """Write the material, unless it is there: the same at every time.

    <folder>/
      model/                          random weights over single characters, with a tokenizer
      chats.parquet                   for SFT: conversations, some of them with a call of the calculator
      train.parquet  test.parquet     for RL: sums with their truth
      tools.yaml                      the calculator
    """
    if folder.exists():
        return
    numbers = random.Random(f"calculator-{SEED}").sample(range(900 * 900), NUM_CHATS + NUM_TRAINING + NUM_TEST)
    sums = [Sum(100 + number // 900, 100 + number % 900) for number in numbers]
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([TOOL], special_tokens=True)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (CALL, CALL_END)])
    rng = random.Random(f"calls-{SEED}")
    with replacing_folder(folder) as place:
        build_model(tokenizer, SEED, hidden=64, layers=2).save_pretrained(place / "model")
        tokenizer.save_pretrained(place / "model")
        write_rows(place / "chats.parquet", [{"messages": _chat(item, rng)} for item in sums[:NUM_CHATS]])
        write_parquet(sums[NUM_CHATS:-NUM_TEST], "train", place / "train.parquet")
        write_parquet(sums[-NUM_TEST:], "test", place / "test.parquet")
        (place / "tools.yaml").write_text(TOOLS)


def _chat(item: Sum, rng: random.Random) -> list[dict[str, str]]:
    question = {"role": "user", "content": item.question}
    answer = {"role": "assistant", "content": f"#### {item.answer}"}
    if rng.random() >= SHARE_OF_CALLS:
        return [question, answer]
    call = {"role": "assistant", "content": f"{CALL}{item.question.rstrip('=')}{CALL_END}"}
    return [question, call, {"role": "tool", "content": item.answer}, answer]
