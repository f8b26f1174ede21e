"""A small policy whose responses have known lengths, and the prompts that go with it.

Its next token depends on the last one alone: a chain of 63 tokens and the end of the sequence. A prompt's last
character says where the chain begins, so a response has 64 tokens or 8, in any framework, and by sampling as usual.
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification, Qwen2Tokenizer

PAD, END = "<|pad|>", "<|end|>"
PROMPT_CHARACTERS = "0123456789+-="
CHAIN = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ!?,.;:()*/$"
LONG, SHORT = "<", ">"
LONG_TOKENS, SHORT_TOKENS = len(CHAIN) + 1, 8
MOST_PROMPT_TOKENS = 40


def build_tokenizer() -> Qwen2Tokenizer:
    """One token per character; a chat is its messages, one after the other."""
    vocabulary = {token: number for number, token in enumerate([PAD, END, *PROMPT_CHARACTERS, LONG, SHORT, *CHAIN])}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def make_prompts(count: int, long_share: float, dice: random.Random) -> list[str]:
    """Prompts of 10 to 40 tokens, such a share of which ask for the long response."""
    kinds = [LONG] * round(count * long_share) + [SHORT] * (count - round(count * long_share))
    dice.shuffle(kinds)
    return [
        "".join(dice.choices(PROMPT_CHARACTERS, k=dice.randint(9, MOST_PROMPT_TOKENS - 1))) + kind for kind in kinds
    ]


def make_material(folder: Path, prompts_per_step: int, steps: int, hidden: int = 256, layers: int = 4) -> None:
    """The policy, a random reward model, and for each workload its prompts as parquet and as token lists."""
    tokenizer = build_tokenizer()
    shape = Qwen2Config(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        num_labels=1,
    )
    torch.manual_seed(0)
    policy = Qwen2ForCausalLM(shape)
    set_chain(policy, tokenizer)
    for name, model in {"policy": policy, "judge": Qwen2ForSequenceClassification(shape)}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for workload, long_share in {"equal": 1.0, "long-tailed": 0.1}.items():
        dice = random.Random(0)
        prompts = [prompt for _ in range(steps) for prompt in make_prompts(prompts_per_step, long_share, dice)]
        rows = [
            {
                "data_source": "judged",
                "prompt": [{"role": "user", "content": prompt}],
                "reward_model": {"style": "model"},
            }
            for prompt in prompts
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{workload}.parquet")
        (folder / f"{workload}.json").write_text(json.dumps([tokenizer(prompt)["input_ids"] for prompt in prompts]))


def set_chain(policy: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> None:
    """Weights with which the last token alone decides the next: no layer adds to the embedding, which the head turns
    into the successor. All layers are computed all the same."""
    successors = {**dict(pairwise(CHAIN)), CHAIN[-1]: END, LONG: CHAIN[0], SHORT: CHAIN[1 - SHORT_TOKENS]}
    with torch.no_grad():
        for layer in policy.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = policy.model.embed_tokens.weight, policy.lm_head.weight
        head.zero_()
        for token, successor in successors.items():
            known, wanted = tokenizer.convert_tokens_to_ids([token, successor])
            head[wanted] += 3.0 * F.normalize(embedding[known], dim=0)
