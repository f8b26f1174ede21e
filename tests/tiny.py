"""A tiny Qwen2 model folder with a character tokenizer: there are no model hubs where the tests run.

folder = make_tiny_model(tmp_path / "model")
AutoModelForCausalLM.from_pretrained(folder); AutoTokenizer.from_pretrained(folder)
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Tokenizer

SPECIAL_TOKENS = ["<pad>", "<eos>", "<unk>"]
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tiny_tokenizer() -> Qwen2Tokenizer:
    """One token per printable ASCII character; <pad>, <eos>, <unk> have the ids 0, 1, 2. Other characters are dropped.

    AutoTokenizer gives a Qwen2Tokenizer for every folder with a Qwen2 model, whatever class was saved. This is one:
    byte-level BPE without merges, in whose alphabet a space is written "\u0120" and a newline "\u010a".
    """
    letters = [{" ": "\u0120", "\n": "\u010a"}.get(character, character) for character in CHARACTERS]
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate([*SPECIAL_TOKENS, *letters])},
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_tiny_model(
    hidden: int = 32,
    layers: int = 2,
    vocab: int | None = None,
    seed: int = 0,
    tie_word_embeddings: bool = True,
    max_position_embeddings: int = 512,
    initializer_range: float = 0.02,
    model_type: str = "qwen2",
) -> PreTrainedModel:
    """A randomly initialised causal LM in float32, Qwen2 unless told.

    `vocab` may exceed the tokenizer's size, as the embeddings of real models do; None takes the tokenizer's size.
    With the usual `initializer_range` all tokens are about as likely and attend to all others alike; 0.2 gives
    a model in which a wrong position or mask shows. The global random state is left as it was.
    """
    tokenizer = make_tiny_tokenizer()
    config = AutoConfig.for_model(
        model_type,
        vocab_size=vocab or len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=initializer_range,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **({"head_dim": hidden // 4} if model_type == "qwen3" else {}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)


def make_tiny_model(folder: str | Path, **sizes: Any) -> Path:
    """Save a model of `build_tiny_model` (safetensors) and its tokenizer in `folder`."""
    build_tiny_model(**sizes).save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return Path(folder)
