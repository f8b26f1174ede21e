"""What the recipe of human preferences begins with: a model that knows nothing, and pairs as hh-rlhf has them.

Made-up people like calm replies and dislike SHOUTED ones; the pairs have hh-rlhf's form, so every command is the one
that real pairs take.
"""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

from transformers import Qwen2Tokenizer

from paceline.cli.quickstart.model import ASSISTANT, CHAT_TEMPLATE, END, PAD, USER, build_model
from paceline.cli.recipe_material import SEED
from paceline.files import replacing_folder

NUM_TRAINING, NUM_TEST = 512, 64
CHARACTERS = string.digits + string.ascii_letters + string.punctuation


def make_hh(folder: Path) -> None:
    """Write the material, unless it is there: the same at every time.

    <folder>/
      model/                         random weights over single characters, with a tokenizer
      raw/train.jsonl  test.jsonl    dialogues with a chosen and a rejected last reply
    """
    if folder.exists():
        return
    with replacing_folder(folder) as place:
        vocabulary = {token: number for number, token in enumerate([PAD, END, USER, ASSISTANT, *CHARACTERS, "Ġ", "Ċ"])}
        tokenizer = Qwen2Tokenizer(
            vocab=vocabulary,
            merges=[],
            unk_token=PAD,
            pad_token=PAD,
            eos_token=END,
            additional_special_tokens=[USER, ASSISTANT],
            chat_template=CHAT_TEMPLATE,
            clean_up_tokenization_spaces=False,
            padding_side="left",
        )
        build_model(tokenizer, SEED, hidden=64, layers=2).save_pretrained(place / "model")
        tokenizer.save_pretrained(place / "model")
        (place / "raw").mkdir()
        for split, count in (("train", NUM_TRAINING), ("test", NUM_TEST)):
            rng = random.Random(f"hh-{split}-{SEED}")
            lines = "".join(json.dumps(_pair(rng)) + "\n" for _ in range(count))
            (place / "raw" / f"{split}.jsonl").write_text(lines)


def _pair(rng: random.Random) -> dict[str, str]:
    def words() -> str:
        return " ".join("".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 5))) for _ in range(3))

    begin, reply = f"\n\nHuman: {words()}?\n\nAssistant: ", words()
    return {"chosen": begin + reply, "rejected": begin + reply.upper()}
