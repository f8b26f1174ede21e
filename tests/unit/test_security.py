"""What docs/security.md promises."""

from __future__ import annotations

import ast
import inspect
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline import redaction
from paceline.config.keys import known_keys
from paceline.config.load import load_config
from paceline.config.secrets import masked_command, without_secrets
from paceline.data.tokenizer import load_tokenizer
from paceline.errors import DataError, WorkerError
from paceline.log_file import LOG_FOLDER_VARIABLE, log_to_file
from paceline.redaction import redacted
from paceline.trainer import ray_session

PACKAGE = Path(paceline.__file__).parent
# To read with them is to run code that the file brings.
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve"}
PRIVATE_PIPES = {"rewards/function_server.py", "rewards/killable.py"}
"""They unpickle what comes from a process that they started themselves, by its own pipe, and no file."""
UNSAFE_CALLS = {"yaml.load", "yaml.unsafe_load", "pd.read_pickle", "pandas.read_pickle"}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call with its name in dots, such as torch.load."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def unsafe_reads(source: str) -> list[str]:
    """What in a module reads files in a way that may run code of theirs."""
    tree = ast.parse(source)
    found = []
    for name, call in calls(tree):
        options = {option.arg: ast.unparse(option.value) for option in call.keywords}
        module, _, function = name.rpartition(".")
        if name in ("torch.load", "torch.serialization.load") and options.get("weights_only") != "True":
            found.append(f"{ast.unparse(call)} without weights_only=True")
        elif module in ("np", "numpy") and function == "load" and options.get("allow_pickle") != "False":
            found.append(f"{ast.unparse(call)} without allow_pickle=False")
        elif name in UNSAFE_CALLS or (module in UNSAFE_MODULES and function in ("load", "loads", "Unpickler", "open")):
            found.append(ast.unparse(call))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in UNSAFE_MODULES
        for alias in node.names
    }
    return found + sorted(imported & {"load", "loads", "Unpickler"})


def test_no_file_of_the_package_reads_in_a_way_that_runs_code() -> None:
    found = {
        str(file.relative_to(PACKAGE)): unsafe
        for file in sorted(PACKAGE.rglob("*.py"))
        if (unsafe := unsafe_reads(file.read_text()))
    }
    assert set(found) == PRIVATE_PIPES


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "pickle.load(stream)",
        "pickle.loads(path.read_bytes())",
        "from pickle import loads",
        "yaml.load(text)",
    ],
)
def test_that_look_sees_what_it_looks_for(source: str) -> None:
    assert len(unsafe_reads(source)) == 1


def test_code_of_a_model_runs_only_if_asked_for() -> None:
    switches = [key for name, key in known_keys().items() if name.endswith(".trust_remote_code")]
    assert len(switches) >= 3
    assert all(key.default is False for key in switches)
    assert inspect.signature(load_tokenizer).parameters["trust_remote_code"].default is False


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({}, (False, None)),
        ({"include_dashboard": True}, (True, None)),
        ({"dashboard_host": "0.0.0.0"}, (False, "0.0.0.0")),
    ],
)
def test_the_dashboard_of_ray_is_off_and_stays_on_this_machine_unless_asked(
    asked: dict[str, object], shown: tuple[bool, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    given: dict[str, object] = {}
    # Ray's own default is this machine alone.
    assert inspect.signature(ray.init).parameters["dashboard_host"].default == "127.0.0.1"
    with monkeypatch.context() as patch:
        real = inspect.signature(ray.init)
        init = lambda **kwargs: given.update(kwargs)  # noqa: E731
        init.__signature__ = real  # type: ignore[attr-defined]
        patch.setattr(ray, "init", init)
        ray_session.start_ray(load_config({"ray_kwargs": {"ray_init": asked}}))
    assert (given["include_dashboard"], given.get("dashboard_host")) == shown


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
