"""A tool that searches a corpus on this machine, by BM25.

    tools:
      - class_name: paceline.agents.search.Search
        config: {type: native, corpus: corpus.jsonl, top_k: 3}

The corpus has a JSON object per line, with `text` and maybe `title`. Needs bm25s: `pip install "paceline[agents]"`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.agents.tools import Tool
from paceline.errors import DataError


class Search(Tool):
    """`{"name": "search", "arguments": {"query": "capital of France"}}`: the texts that fit best, one after another."""

    schema = {  # noqa: RUF012 - the type of the base class is that of a mapping that nobody changes
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches a collection of texts.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "some words"}},
                "required": ["query"],
            },
        },
    }

    def __init__(self, *, corpus: str, top_k: int = 3) -> None:
        import bm25s

        super().__init__(corpus=corpus, top_k=top_k)
        self._texts = [_text(line, f"{corpus}:{number}") for number, line in _lines(corpus)]
        if not self._texts:
            raise DataError(f"{corpus} has no texts")
        self._top_k = min(top_k, len(self._texts))
        self._tokenize = bm25s.tokenize
        self._index = bm25s.BM25()
        self._index.index(self._tokenize(self._texts, show_progress=False), show_progress=False)

    async def execute(self, state: Any, arguments: dict[str, Any], memory: dict[str, Any]) -> str:
        tokens = self._tokenize(str(arguments["query"]), show_progress=False, return_ids=False)
        if not tokens[0]:
            return "nothing found"
        places, scores = self._index.retrieve(tokens, k=self._top_k, show_progress=False)
        found = [self._texts[place] for place, score in zip(places[0], scores[0], strict=True) if score > 0]
        return "\n\n".join(found) or "nothing found"


def _lines(corpus: str) -> list[tuple[int, str]]:
    lines = Path(corpus).expanduser().read_text().splitlines()
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _text(line: str, place: str) -> str:
    item = json.loads(line)
    if not isinstance(item, dict) or not isinstance(item.get("text"), str):
        raise DataError(f"{place} has no `text`")
    return f"{item['title']}: {item['text']}" if item.get("title") else str(item["text"])
