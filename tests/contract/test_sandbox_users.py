"""The local sandbox of different users, and where programs can't be isolated."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import paceline
from paceline.errors import SandboxUnavailableError
from paceline.rewards.sandbox import LocalSandbox, Program, SandboxLimits

REPOSITORY = Path(paceline.__file__).parents[1]

pytestmark = pytest.mark.usefixtures("isolation")


def test_jails_of_root_have_users_of_their_own():
    if os.geteuid() != 0 or "4294967295" not in Path("/proc/self/uid_map").read_text():
        pytest.skip("needs root, and all users")
    marker = uuid.uuid4().hex
    code = f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(2)', {marker!r}])"
    thread = threading.Thread(
        target=LocalSandbox(SandboxLimits(memory_bytes=128 << 20)).run_many, args=([Program(code)] * 2,)
    )
    thread.start()
    users: set[int] = set()
    while thread.is_alive() and len(users) < 2:
        for process in _processes_with(marker):
            with contextlib.suppress(psutil.Error):
                users.add(process.uids().real)
        time.sleep(0.05)
    thread.join()
    assert len(users) == 2
    assert 0 not in users


def _processes_with(marker: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if marker in (process.info["cmdline"] or [])]


@pytest.fixture
def as_nobody() -> Iterator[list[str]]:
    """The start of a command line that runs Python code as an ordinary user, who may not read this interpreter."""
    python = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if _suits_nobody(path)), None)
    if os.geteuid() != 0 or python is None:
        pytest.skip("needs root, and a Python 3.11 or later that others may use")
    copy = Path("/tmp") / f"paceline-{uuid.uuid4().hex}"
    rewards = Path("paceline", "rewards")
    shutil.copytree(REPOSITORY / rewards / "sandbox", copy / rewards / "sandbox")
    shutil.copytree(REPOSITORY / rewards / "score" / "code", copy / rewards / "score" / "code")
    names = ("errors", "machine", "redaction")
    for file in (*(Path("paceline", f"{name}.py") for name in names), rewards / "score" / "__init__.py"):
        shutil.copy(REPOSITORY / file, copy / file)
    for path in [copy, *copy.rglob("*")]:
        path.chmod(0o755)
    yield [python, "-c", f"import sys\nsys.path.insert(0, {str(copy)!r})\nexec(sys.argv[1])"]
    shutil.rmtree(copy)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, user=65534, group=65534, extra_groups=[], cwd="/", capture_output=True, text=True, timeout=120
    )


def test_an_ordinary_user_has_the_same_jail(as_nobody):
    programs = [
        "import os\nprint(os.getuid())",
        "open('/etc/passwd')",
        "import os\nos.kill(0, 9)",
        "import os\nos.kill(os.getppid(), 9)\nprint('sent')",
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "kept = []\nwhile True:\n    kept.append(bytearray(1 << 20))",
        "import socket\nsocket.socket()",
        "open('/new', 'w')",
        "open('/program/main.py', 'a')",
        "print('alive')",
    ]
    script = (
        "import json\nfrom paceline.rewards.sandbox import LocalSandbox, Program, SandboxLimits\n"
        "results = []\nfor code in json.loads(sys.argv[2]):\n"
        # Only what never ends is stopped by the clock: a busy machine must not look like a slow program.
        "    seconds = 1 if 'fork' in code else 30\n"
        "    limits = SandboxLimits(cpu_seconds=seconds, wall_seconds=2 * seconds, memory_bytes=128 << 20)\n"
        "    results.append(LocalSandbox(limits).run(Program(code)))\n"
        "print(json.dumps([[result.status, result.stdout] for result in results]))"
    )
    done = _run([*as_nobody, script, json.dumps(programs)])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ["ok", "1000\n"], ["error", ""], ["error", ""], ["ok", "sent\n"], ["timeout", ""], ["memory", ""],
        ["error", ""], ["error", ""], ["error", ""], ["ok", "alive\n"],
    ]  # fmt: skip


def test_an_ordinary_user_can_grade(as_nobody):
    rows = [
        ["def f(x): return x + 1", ["assert f(1) == 2"]],
        ["print(int(input()) + 1)", {"inputs": ["1"], "outputs": ["2"]}],
        ["class math: isclose = lambda *a: True\ndef f(x): return 0", "assert math.isclose(f(1), 2)"],
        ["import os\ndef f(x): os.kill(-1, 9)", "assert f(1) == 2"],
        ["def f(x): return x", {"fn_name": "f", "inputs": [[3]], "outputs": [3]}],
    ]
    script = (
        "import json\nfrom paceline.rewards.score import code\nrows = json.loads(sys.argv[2])\n"
        "blocks = ['```python\\n' + program + '\\n```' for program, _ in rows]\n"
        "results = code.compute_scores(blocks, [truth for _, truth in rows], [None] * len(rows))\n"
        "print(json.dumps([result['score'] for result in results]))"
    )
    done = _run([*as_nobody, script, json.dumps(rows)])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_a_kernel_that_forbids_user_namespaces_is_named():
    """In a user namespace that may hold no further one."""
    check = "from paceline.rewards.sandbox import LocalSandbox; LocalSandbox().check()"
    inner = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-U", "-r", "sh", "-c", inner, sys.executable, check],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if "max_user_namespaces" not in done.stderr:
        pytest.skip(f"no namespace with a limit of its own to be had: {done.stderr[-200:]}")
    assert "SandboxUnavailableError: LocalSandbox can't isolate programs on this machine" in done.stderr
    assert "max_user_namespaces=0: as root, sysctl user.max_user_namespaces=10000" in done.stderr


def _suits_nobody(python: str) -> bool:
    code = "import sys; sys.exit(sys.version_info < (3, 11))"
    try:
        return subprocess.run([python, "-c", code], user=65534, group=65534, extra_groups=[]).returncode == 0
    except OSError:
        return False


def test_a_machine_without_namespaces_is_refused_and_nothing_runs(tmp_path):
    """In a process that may not make namespaces, as in a container with the usual system call filter."""
    witness = tmp_path / "ran"
    script = f"""
import os
from paceline.rewards.sandbox import LocalSandbox, Program, jail, system_calls
sandbox = LocalSandbox()
token, numbers = system_calls.ARCHITECTURES[os.uname().machine]
system_calls.ARCHITECTURES[os.uname().machine] = (token, {{"clone": numbers["clone"]}})
system_calls.NEW_CALLS = {{}}
jail.prctl(jail.PR_SET_NO_NEW_PRIVS, 1)
jail.filter_system_calls(system_calls.filter_code())
for call in (lambda: sandbox.run(Program("open({str(witness)!r}, 'w')")), lambda: sandbox.run_many([])):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(
            "SandboxUnavailableError LocalSandbox can't isolate programs on this machine, so it runs none"
        )
        assert "making namespaces: Operation not permitted" in line
        assert "PACELINE_SANDBOX_URL" in line
    assert not witness.exists()


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailableError, match="this is darwin, not Linux"):
        LocalSandbox().run(Program("print(1)"))


def test_the_refusal_survives_pickling():
    error = pickle.loads(pickle.dumps(SandboxUnavailableError("no isolation")))
    assert str(error) == "no isolation"
