"""Secrets are hidden in what a run logs and writes, and plain words are not."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import redaction
from paceline.config.load import load_config
from paceline.config.secrets import masked_command, without_secrets
from paceline.errors import DataError, WorkerError
from paceline.log_file import LOG_FOLDER_VARIABLE, log_to_file
from paceline.redaction import redacted


def test_secrets_of_users_are_masked_and_keys_of_ours_are_not() -> None:
    secrets = {
        "WANDB_API_KEY": "x",
        "HF_TOKEN": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "password": 1234,
        "openai-api-key": "x",
        "accessToken": "x",
        "tokens": "x",
        "api_keys": "x",
    }
    plain = {
        "PATH": "/bin",
        "max_num_batched_tokens": 5,
        "sort_keys": True,
        "keyboard": "us",
        "KEY": None,
        "max_tokens": 7,
    }
    below = {"credentials": {"user": "x", "more": ["y", {"deep": "z"}]}, "apiKeys": ["x", "y"]}
    tree = {
        "data": {"prompt_key": "question", "reward_fn_key": "source"},
        "custom_reward_function": {"reward_kwargs": {**secrets, **plain, "nested": [{"token": "x"}], **below}},
        "reward_model": {"sandbox": {"url": "https://user:word@host/run"}},
    }
    masked = without_secrets(tree)
    assert masked["data"] == tree["data"]
    assert masked["custom_reward_function"]["reward_kwargs"] == {
        **dict.fromkeys(secrets, "***"),
        **plain,
        "nested": [{"token": "***"}],
        "credentials": {"user": "***", "more": ["***", {"deep": "***"}]},
        "apiKeys": ["***", "***"],
    }
    assert masked["reward_model"]["sandbox"]["url"] == "https://***@host/run"
    assert tree["custom_reward_function"]["reward_kwargs"]["HF_TOKEN"] == "x"  # type: ignore[index]


@pytest.fixture
def no_secrets_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What this test makes known is forgotten again."""
    monkeypatch.setattr(redaction, "_known", set())
    redaction._pattern.cache_clear()
    yield
    redaction._pattern.cache_clear()


def test_a_value_that_is_known_as_a_secret_is_hidden_wherever_it_appears(no_secrets_known: None) -> None:
    load_config({"custom_reward_function": {"reward_kwargs": {"login": {"password": "correct horse", "user": "me"}}}})
    load_config({"ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"MY_TOKEN": "a1b2"}}}}})
    assert redacted("refused: correct horse, a1b2, xa1b2c, me") == "refused: ***, ***, xa1b2c, me"
    assert without_secrets({"trainer": {"project_name": "of a1b2"}}) == {"trainer": {"project_name": "of ***"}}
    assert str(DataError("no access with correct horse")) == "no access with ***"
    error = WorkerError("reward", 0, "compute_reward", "401 for a1b2", "  raise Refused('a1b2')")
    for seen in (error, pickle.loads(pickle.dumps(error))):
        assert "a1b2" not in str(seen)


def test_a_plain_word_under_a_name_such_as_key_stays_readable_in_logs(no_secrets_known: None) -> None:
    load_config({"custom_reward_function": {"reward_kwargs": {"answer_key": "question", "label_keys": ["level"]}}})
    assert redacted("a question of level 3") == "a question of level 3"


@pytest.mark.parametrize(
    "argument",
    [
        "ray_kwargs.ray_init.runtime_env.env_vars={HF_TOKEN: qwe123,PLAIN: b}",
        "ray_kwargs.ray_init.runtime_env={env_vars:{HF_TOKEN:qwe123}}",
        "++custom_reward_function.reward_kwargs={api_keys: [qwe123, other]}",
        "custom_reward_function.reward_kwargs={token: 'qwe123'}",
        "custom_reward_function.reward_kwargs={token: [qwe123",
        "ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN=qwe123",
    ],
)
def test_a_secret_in_a_command_is_hidden_in_every_form(no_secrets_known: None, argument: str) -> None:
    [shown] = masked_command([argument])
    assert "qwe123" not in shown
    assert shown.startswith(argument.split("=")[0])
    if "PLAIN" in argument:
        assert shown.endswith("env_vars={HF_TOKEN: ***,PLAIN: b}")


def test_log_lines_and_their_tracebacks_have_no_secrets(
    no_secrets_known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG_FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("SOME_API_KEY", "from-the-shell")
    root = logging.getLogger()
    before = list(root.handlers)
    log_to_file("worker_0")
    [handler] = [handler for handler in root.handlers if handler not in before]
    try:
        logging.getLogger("some.part").error("%s was refused", "from-the-shell")
        try:
            raise ValueError("from-the-shell is no key")
        except ValueError:
            logging.getLogger("some.part").exception("it failed")
    finally:
        root.removeHandler(handler)
        handler.close()
    text = (tmp_path / "worker_0.log").read_text()
    assert "from-the-shell" not in text
    assert "*** was refused" in text
    assert "ValueError: *** is no key" in text
