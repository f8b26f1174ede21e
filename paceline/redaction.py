"""Secrets that this process knows: used, and shown nowhere.

What looks like a secret by its name is remembered by its value. From then on the value is `***` in every log line, in
every error of ours and in the files of a run, wherever it comes from.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

MASK = "***"
_STRONG = frozenset(
    (
        "token",
        "secret",
        "secrets",
        "password",
        "passwords",
        "passwd",
        "pwd",
        "passphrase",
        "credential",
        "credentials",
        "auth",
        "authorization",
        "apikey",
        "apikeys",
        "bearer",
    )
)
_WEAK = frozenset(("key", "keys", "tokens"))
"""Words that also name columns and counts: their values are hidden, and only remembered if no plain word."""
_KINDS_OF_KEY = frozenset(("api", "access", "private", "signing", "encryption", "account"))
_SHORTEST = 4
_SHORT = 8
"""Shorter values are only looked for as whole words: parts of other words and numbers may be the same by chance."""
_FORMS = re.compile(
    r"\b(hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[bp]-)[A-Za-z0-9_-]{8,}"
    r"|(?<=://)[^/\s@'\"]+(?=@)"  # user and password of an address
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/=-]{8,}"
    r"|(?<=[?&])(?:api_?key|access_token|token|secret|password|sig)=[^&\s'\"]+"
)

_known: set[str] = set()


def words_of(name: str) -> list[str]:
    """The words of a name, in lower case.

    >>> words_of("accessToken"), words_of("openai-api-key"), words_of("AWS_SECRET_ACCESS_KEY")
    (['access', 'token'], ['openai', 'api', 'key'], ['aws', 'secret', 'access', 'key'])
    """
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().replace("-", "_").split("_")


def is_secret_name(name: str) -> bool:
    """Whether a value under this name is to be hidden. A way to prove who one is (`RAY_AUTH_MODE=token`) is no proof.

    >>> is_secret_name("RAY_AUTH_TOKEN"), is_secret_name("RAY_AUTH_MODE")
    (True, False)
    """
    words = words_of(name)
    return words[-1] != "mode" and any(word in _STRONG or word in _WEAK for word in words)


def is_secret(name: str, value: object) -> bool:
    """Whether the value of this name is to be hidden. A count (`max_tokens: 5`) or a switch (`sort_keys: true`) is not.

    >>> is_secret("HF_TOKEN", "x"), is_secret("tokens", ["x"]), is_secret("max_tokens", 5), is_secret("PATH", "/bin")
    (True, True, False, False)
    """
    if value is None or isinstance(value, bool) or not is_secret_name(name):
        return False
    singular = any(word in _STRONG or word == "key" for word in words_of(name))
    return singular or not isinstance(value, int | float)


def remember(name: str, value: str) -> None:
    """Hide this value from now on, wherever it appears; `name` is what it was found under."""
    words = words_of(name)
    strong = any(word in _STRONG for word in words) or ("key" in words and bool(_KINDS_OF_KEY.intersection(words)))
    if len(value) >= _SHORTEST and (strong or not re.fullmatch(r"[a-z_ ]+", value)):
        remember_all([value])


def remember_all(values: Iterable[str]) -> None:
    """Hide these values, which another process knows to be secrets."""
    _known.update(values)
    _pattern.cache_clear()


def known_secrets() -> frozenset[str]:
    """The values that are hidden here: for a process that is started."""
    return frozenset(_known)


def remember_environment(variables: Mapping[str, str] = os.environ) -> None:
    """Hide the values of environment variables whose names are those of secrets."""
    for name, value in variables.items():
        if is_secret(name, value) and not os.path.exists(value):  # SSH_AUTH_SOCK and its like are no secrets
            remember(name, value)


@lru_cache(maxsize=1)
def _pattern() -> re.Pattern[str] | None:
    if not _known:
        return None
    longest_first = sorted(_known, key=len, reverse=True)
    return re.compile(
        "|".join(
            rf"(?<![A-Za-z0-9]){re.escape(value)}(?![A-Za-z0-9])" if len(value) < _SHORT else re.escape(value)
            for value in longest_first
        )
    )


def redacted(text: str) -> str:
    """The text without the secrets that are known, and without what has the usual form of one.

    >>> redacted("GET https://me:pw@host/run with hf_abcdefgh1234")
    'GET https://***@host/run with ***'
    """
    pattern = _pattern()
    if pattern is not None:
        text = pattern.sub(MASK, text)
    return _FORMS.sub(MASK, text)


class RedactingFormatter(logging.Formatter):
    """A log line, with its traceback, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))
