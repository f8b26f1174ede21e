"""Chat templates of three kinds, and an engine that samples what a test wants."""

from __future__ import annotations

import random
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from paceline.agents.conversation import Sampled
from paceline.agents.template import ChatTemplate
from tests.tiny import make_tiny_tokenizer

BLOCKS = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Every message ends with the end-of-sequence token, and a newline."""
TURNS_ONLY = (
    "{% if tools %}Tools: {% for t in tools %}{{ t['function']['name'] }} {% endfor %}\n{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A:{{ m['content'] }}<eos>{% else %}"
    "{{ m['role'] | upper }}({{ m['content'] | length }}):{{ m['content'] }}|{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
"""Only the assistant's messages end with it, and nothing stands between it and the next message."""
FORGETS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}"
    "[assistant]{{ m['content'].split('#')[-1] }}<eos>{% else %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""What an assistant said before a # is gone when others have spoken: not append-only."""
TEMPLATES = {"blocks": BLOCKS, "turns only": TURNS_ONLY, "forgets": FORGETS}


def chat_template(name: str) -> ChatTemplate:
    return ChatTemplate(tokenizer_with(TEMPLATES[name]), {})


def tokenizer_with(template: str) -> PreTrainedTokenizerBase:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def random_turn(generator: random.Random, tokens: Sequence[int], eos: int, room: int) -> Sampled:
    """Any tokens, up to the room that there is."""
    ids = generator.choices(tokens, k=generator.randint(1, min(room, 12)))
    ends = generator.random() < 0.8
    if ends:
        ids[-1] = eos
    return Sampled(ids, [-generator.random() for _ in ids], ends)
