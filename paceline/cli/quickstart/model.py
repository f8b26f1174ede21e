"""The quickstart's model: a Qwen2 of about one million parameters over characters, pre-trained in under a minute.

Takes sums and a seed; gives a Hugging Face model and its tokenizer. On one machine one seed gives one set of weights:
the number of threads is fixed, since it changes the order of additions.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from paceline.cli.quickstart.task import Sum, pretraining_answer

logger = logging.getLogger(__name__)

PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
CHARACTERS = "0123456789+=#Ġ"
"""The last one stands for a space, as in all byte-level vocabularies."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{% if message['role'] == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

PRETRAINING_STEPS = 320
BATCH_SIZE = 64
LEARNING_RATE = 2.5e-3
WARMUP_STEPS = 20
NUM_THREADS = 1
STEPS_PER_LINE = 50
IGNORED = -100


def build_tokenizer() -> Qwen2Tokenizer:
    """One token per character, four special tokens and a chat template.

    Of Qwen2's own class, which is what AutoTokenizer makes of any tokenizer that is beside a Qwen2 model.
    """
    vocabulary = {token: index for index, token in enumerate([PAD, END, USER, ASSISTANT, *CHARACTERS])}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=64,
        padding_side="left",
    )


def build_model(tokenizer: Qwen2Tokenizer, seed: int, *, hidden: int = 128, layers: int = 4) -> Qwen2ForCausalLM:
    """A Qwen2 with random weights that depend on `seed` alone."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        # Twice the usual spread: so narrow a model learns sums in about half the steps.
        initializer_range=0.04,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def pretrain(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    sums: list[Sum],
    *,
    seed: int,
    num_steps: int = PRETRAINING_STEPS,
) -> float:
    """Teach the model to answer sums in mixed formats and with mistakes. Gives the loss of the last step."""
    rng = random.Random(f"pretrain-{seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share_of_learning_rate(step, num_steps))
    model.train()
    started = time.monotonic()
    with _threads(NUM_THREADS):
        for step in range(1, num_steps + 1):
            input_ids, labels = _batch(tokenizer, rng.choices(sums, k=BATCH_SIZE), rng)
            logits = model(input_ids=input_ids[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % STEPS_PER_LINE == 0 or step == num_steps:
                seconds = time.monotonic() - started
                logger.info("pre-training step %d/%d | loss %.3f | %.0f s", step, num_steps, loss.item(), seconds)
    model.eval()
    return loss.item()


def _batch(tokenizer: Qwen2Tokenizer, sums: list[Sum], rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, (batch, length), padded on the right; only answers are learned."""
    prompts = tokenizer([f"{USER}{item.question}{ASSISTANT}" for item in sums])["input_ids"]
    answers = tokenizer([f"{pretraining_answer(item, rng)}{END}" for item in sums])["input_ids"]
    rows = list(zip(prompts, answers, strict=True))
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    input_ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    labels = torch.full((len(rows), length), IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return input_ids, labels


def _share_of_learning_rate(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / num_steps)))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (0.05 + 0.95 * cosine)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
