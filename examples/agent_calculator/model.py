"""The example's model: a Qwen2 of 0.13 million parameters over characters, and sums that it can't do.

It is pre-trained on conversations. In some the assistant calls a calculator and repeats what that says, in most it
answers at once. Copying is learned soon, adding numbers of three digits is not: so it knows how to call, seldom
does, and is mostly wrong when it does not.
"""

import math
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from transformers import AddedToken, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

PAD, END, USER, ASSISTANT, TOOL = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>"
CHARACTERS = "0123456789+=#Ġ"
"""The last one stands for a space, as in all byte-level vocabularies."""
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
CALL_END = '"}}</tool_call>'
"""A token each: so small a model has better things to learn than to spell them."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{% if message['role'] == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DATA_SOURCE = "paceline/sums"
"""Scored as GSM8K is: by the number after `####`."""
SHARE_OF_CALLS = 0.2
STEPS, BATCH_SIZE, LEARNING_RATE, WARMUP_STEPS = 640, 64, 3e-3, 20
IGNORED = -100


def build_tokenizer():
    """One token per character and for each end of a call, five special tokens and a chat template."""
    vocabulary = {token: index for index, token in enumerate([PAD, END, USER, ASSISTANT, TOOL, *CHARACTERS])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT, TOOL],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=64,
        padding_side="left",
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (CALL, CALL_END)])
    return tokenizer


def build_model(tokenizer, seed):
    """A Qwen2 with random weights that depend on `seed` alone."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.04,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def draw_sums(seed, count):
    """So many different sums of two numbers of three digits."""
    numbers = random.Random(f"sums-{seed}").sample(range(900 * 900), count)
    return [(100 + number // 900, 100 + number % 900) for number in numbers]


def turns(left, right, rng):
    """A conversation to learn: (text, whether the assistant says it)."""
    answer = f"#### {left + right}{END}"
    question = (f"{USER}{left}+{right}={ASSISTANT}", False)
    if rng.random() >= SHARE_OF_CALLS:
        return [question, (answer, True)]
    call = (f"{CALL}{left}+{right}{CALL_END}{END}", True)
    return [question, call, (f"{TOOL}{left + right}{ASSISTANT}", False), (answer, True)]


def pretrain(model, tokenizer, seed, log):
    """Teach the model both ways to answer."""
    rng = random.Random(f"pretrain-{seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    torch.set_num_threads(1)  # its number changes the order of additions, and so the weights
    model.train()
    for step in range(1, STEPS + 1):
        share = min(1.0, step / WARMUP_STEPS) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / STEPS)))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * share
        input_ids, labels = make_batch(tokenizer, rng)
        logits = model(input_ids=input_ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            log(f"pre-training step {step}/{STEPS} | loss {loss.item():.3f}")
    model.eval()


def make_batch(tokenizer, rng):
    """Token ids and labels, (batch, length), padded on the right; only what the assistant says is learned."""
    rows = []
    for _ in range(BATCH_SIZE):
        ids, labels = [], []
        for text, is_learned in turns(rng.randint(100, 999), rng.randint(100, 999), rng):
            tokens = tokenizer(text)["input_ids"]
            ids += tokens
            labels += tokens if is_learned else [IGNORED] * len(tokens)
        rows.append((ids, labels))
    length = max(len(ids) for ids, _ in rows)
    input_ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    labels = torch.full((len(rows), length), IGNORED)
    for row, (ids, learned) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(ids)] = torch.tensor(learned)
    return input_ids, labels


def write_sums(path: Path, sums):
    """Rows as the GSM8K preparation writes them."""
    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": f"{left}+{right}="}],
            "reward_model": {"style": "rule", "ground_truth": str(left + right)},
        }
        for left, right in sums
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
