"""Material for runs whose rows are scored in different ways: a rule, a reward model, a program's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForSequenceClassification

from paceline.data.sources.base import rl_schema
from tests.runs import base_config, make_material
from tests.tiny import make_tiny_tokenizer

GSM8K, HH, CODE = "openai/gsm8k", "Dahoas/full-hh-rlhf", "paceline/code"


def make_reward_model(folder: Path, base: Path, chat_template: str | None = None, seed: int = 3) -> Path:
    """A sequence classifier on the body of `base` with a random score head, and its tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForSequenceClassification.from_pretrained(base, num_labels=1)
        torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    return folder


def mixed_rows(count: int) -> list[dict[str, Any]]:
    """Rows of the three sources in turn."""
    rows = []
    for index in range(count):
        source = (GSM8K, HH, CODE)[index % 3]
        truth = {GSM8K: str(index), HH: None, CODE: json.dumps({"asserts": [f"assert x == {index}"]})}[source]
        rows.append(
            {
                "data_source": source,
                "prompt": [{"role": "user", "content": f"{source[:4]} {index}"}],
                "ability": "any",
                "reward_model": {"style": "model" if truth is None else "rule", "ground_truth": truth},
                "extra_info": {"split": "train", "index": index},
            }
        )
    return rows


def make_mixed_material(folder: Path, rows: int = 12) -> Path:
    """As `make_material`, with rows of three sources and a reward model with a chat template of its own."""
    make_material(folder)
    columns = [field for field in rl_schema() if field.name != "extra_info"]
    schema = pa.schema([*columns, ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64())]))])
    for name in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(mixed_rows(rows), schema=schema), folder / f"{name}.parquet")
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    make_reward_model(folder / "reward_model", folder / "model", chat_template=template)
    return folder


def teach(folder: Path, answers: dict[str, str], most_steps: int = 2000) -> None:
    """Let the tiny model in `folder` learn by heart what to answer to each user's message, until it surely does."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": asked}], tokenize=False, add_generation_prompt=True)
        for asked in answers
    ]
    endings = [f"{answer}<eos>" for answer in answers.values()]
    texts = [prompt + ending for prompt, ending in zip(prompts, endings, strict=True)]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    lengths = torch.tensor([len(tokenizer(ending, add_special_tokens=False)["input_ids"]) for ending in endings])
    tokens_left = batch["attention_mask"].flip(1).cumsum(1).flip(1)
    is_answer = batch["attention_mask"].bool() & (tokens_left <= lengths[:, None])
    labels = batch["input_ids"].masked_fill(~is_answer, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(most_steps):
        loss = model(**batch, labels=labels).loss
        if float(loss) < 0.005:
            model.save_pretrained(folder)
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the loss is {float(loss):.3f} after {most_steps} steps")


def mixed_config(material: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "custom_reward_function__path": None,
        "reward_model__enable": True,
        "reward_model__strategy": "local",
        "reward_model__model__path": str(material / "reward_model"),
        "reward_model__micro_batch_size_per_gpu": 3,
        "data__train_batch_size": 6,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 3,
        "trainer__total_training_steps": 3,
    }
    return base_config(material, run_dir, **(settings | changes))
