"""The local sandbox: what programs try in it, and that the next one still runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import paceline
from paceline.errors import ConfigError
from paceline.rewards.sandbox import LocalSandbox, Program, RunResult, SandboxLimits
from paceline.rewards.sandbox.local import BUSY_FACTOR, PAUSES_SECONDS

LIMITS = SandboxLimits(
    cpu_seconds=1,
    wall_seconds=2.0,
    memory_bytes=128 << 20,
    output_bytes=64 << 10,
    file_bytes=1 << 20,
    disk_bytes=4 << 20,
)
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
REPOSITORY = Path(paceline.__file__).parents[1]

pytestmark = pytest.mark.usefixtures("isolation")


@pytest.fixture
def sandbox() -> Iterator[LocalSandbox]:
    """A sandbox that must still work after what the test did to it."""
    sandbox = LocalSandbox(LIMITS)
    yield sandbox
    assert sandbox.run(Program("print('alive')")).stdout == "alive\n"


def run(sandbox: LocalSandbox, code: str, stdin: str = "") -> RunResult:
    return sandbox.run(Program(textwrap.dedent(code), stdin))


def processes_with(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if marker in (process.info["cmdline"] or []):
            found.append(process)
    return found


def vanishes(marker: str, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while processes_with(marker):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# -- programs that mean no harm ---------------------------------------------------------------------------------------


def test_a_program_reads_and_prints(sandbox):
    result = run(sandbox, "import sys\nprint(int(input()) + 1, 'é')\nprint('noted', file=sys.stderr)", stdin="41\n")
    assert (result.status, result.exit_code, result.stdout, result.stderr) == ("ok", 0, "42 é\n", "noted\n")
    assert 0 < result.seconds < 2


def test_the_standard_library_is_there(sandbox):
    result = run(
        sandbox,
        """
        import asyncio, bisect, collections, ctypes, decimal, fractions, heapq, json, math, multiprocessing, random, re
        import sqlite3, subprocess, tempfile, threading, zlib
        async def answer():
            return 42
        thread = threading.Thread(target=lambda: print(asyncio.run(answer())))
        thread.start()
        thread.join()
        with tempfile.TemporaryFile("w+") as file:
            file.write("kept")
            file.seek(0)
            print(file.read())
        exit()
        """,
    )
    assert (result.status, result.stdout) == ("ok", "42\nkept\n"), result.stderr


def test_an_exception_is_an_error_with_its_traceback(sandbox):
    result = run(sandbox, "1 / 0")
    assert (result.status, result.exit_code) == ("error", 1)
    assert "ZeroDivisionError" in result.stderr


def test_a_signal_is_an_error_with_its_number(sandbox):
    assert run(sandbox, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)").exit_code == -signal.SIGSEGV


def test_one_program_gives_one_result(sandbox):
    code = "print({str(number) for number in range(50)})"
    assert run(sandbox, code).stdout == run(sandbox, code).stdout


def test_each_program_has_a_folder_of_its_own(sandbox):
    code = "import os\nprint(os.listdir('.'))\nopen('left', 'w').write('x')\nprint(os.listdir('.'))"
    for _ in range(2):
        assert run(sandbox, code).stdout == "[]\n['left']\n"


def test_results_come_in_order(sandbox):
    results = sandbox.run_many([Program(f"print({number})") for number in range(8)])
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(8)]
    assert sandbox.run_many([]) == []


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/1/environ", "/proc/self/mounts", "/sys/kernel", "/dev/kmsg"],
)
def test_files_of_the_system_do_not_exist(sandbox, path):
    result = run(sandbox, f"open({path!r})")
    assert result.status == "error"
    assert "FileNotFoundError" in result.stderr


def test_the_home_folder_holds_nothing_but_the_way_to_python(sandbox):
    home = Path.home()
    code = f"import os\nprint([os.path.join(top, name) for top, _, names in os.walk({str(home)!r}) for name in names])"
    result = run(sandbox, f"{code}\nprint(os.listdir(os.path.expanduser('~')))")
    shown, own = result.stdout.splitlines() if result.ok else ("[]", "[]")
    assert own == "[]"
    outside = [path for path in eval(shown) if not Path(path).is_relative_to(sys.base_prefix)]
    assert outside == []


def test_a_secret_beside_the_trainer_is_out_of_reach(sandbox, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    tries = [
        str(secret),
        f"/old{secret}",
        f"/proc/1/root{secret}",
        f"/tmp/../..{secret}",
        f"/proc/self/cwd/../{secret}",
    ]
    result = run(
        sandbox,
        f"""
        import os
        for path in {tries!r}:
            try:
                print(open(path).read())
            except OSError as error:
                print(type(error).__name__)
        try:
            os.chroot('/tmp')
        except OSError as error:
            print(type(error).__name__)
        """,
    )
    assert result.stdout.split() == ["FileNotFoundError"] * len(tries) + ["PermissionError"]


def test_nothing_can_be_written_outside_the_folder(sandbox, tmp_path):
    targets = ["/new", "/usr/lib/new", "/program/main.py", "/program/new", "/dev/new", str(tmp_path / "new"),
               f"{sys.base_prefix}/lib/new", os.__file__, os.path.realpath(sys.executable)]  # fmt: skip
    before = {path: Path(path).stat().st_mtime_ns for path in targets if Path(path).exists()}
    result = run(
        sandbox,
        f"""
        import os
        for path in {targets!r}:
            for action in (lambda: open(path, "a").write("x"), lambda: os.unlink(path), lambda: os.chmod(path, 0o777)):
                try:
                    action()
                    print("written", path)
                except OSError:
                    pass
        """,
    )
    assert (result.status, result.stdout) == ("ok", "")
    assert not (tmp_path / "new").exists()
    assert {path: Path(path).stat().st_mtime_ns for path in targets if Path(path).exists()} == before


def test_what_is_shown_is_read_only_even_to_its_owner(sandbox, tmp_path):
    """As for a Python in the home folder of an ordinary user, or one that everybody may write."""
    shown = tmp_path / "shown"
    shown.mkdir()
    shown.chmod(0o777)
    (shown / "file").write_text("unchanged")
    (shown / "file").chmod(0o666)
    sandbox._files["binds"] = [*sandbox._files["binds"], str(shown)]
    result = run(
        sandbox,
        f"""
        print(open({str(shown / "file")!r}).read())
        for name in ("file", "new"):
            try:
                open({str(shown)!r} + "/" + name, "w")
            except OSError as error:
                print(error.strerror)
        """,
    )
    assert result.stdout == "unchanged\nRead-only file system\nRead-only file system\n"
    assert (shown / "file").read_text() == "unchanged"
    assert not (shown / "new").exists()


def test_packages_of_the_trainer_are_not_there(sandbox):
    assert "ModuleNotFoundError" in run(sandbox, "import numpy").stderr
    assert "ModuleNotFoundError" in run(sandbox, "import paceline").stderr


def test_files_are_limited_in_size_number_and_sum(sandbox):
    assert "OSError" in run(sandbox, "open('big', 'wb').write(bytes(2 << 20))").stderr
    in_sum = "for number in range(8):\n    open(str(number), 'wb').write(bytes(1 << 20))"
    assert "No space left" in run(sandbox, in_sum).stderr
    assert "No space left" in run(sandbox, "for number in range(10000):\n    open(str(number), 'w').close()").stderr
    assert "Too many open files" in run(sandbox, "files = [open('/dev/null') for _ in range(1000)]").stderr


def test_neither_environment_nor_descriptors_are_inherited(sandbox, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", "the secret")
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        result = run(
            sandbox,
            """
            import os
            print("WANDB_API_KEY" in os.environ, os.environ.get("PATH"))
            for descriptor in range(3, 4096):
                try:
                    os.fstat(descriptor)
                    print("open", descriptor)
                except OSError:
                    pass
            """,
        )
    assert result.stdout == "False /nonexistent\n"


# -- network ----------------------------------------------------------------------------------------------------------


def test_no_socket_reaches_anybody(sandbox):
    abstract = f"\0paceline-{uuid.uuid4().hex}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(abstract)
        unix.listen()
        result = run(
            sandbox,
            f"""
            import ctypes, socket
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
                for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET):
                    try:
                        socket.socket(family, kind)
                        print("opened", family, kind)
                    except OSError:
                        pass
            try:
                socket.create_connection(("127.0.0.1", {tcp.getsockname()[1]}), timeout=1)
                print("connected")
            except OSError as error:
                print(type(error).__name__)
            try:
                socket.socket(socket.AF_UNIX).connect({abstract!r})
                print("connected")
            except OSError as error:
                print(type(error).__name__)
            """,
        )
        for server in (tcp, unix):
            server.settimeout(0.1)
            with pytest.raises(TimeoutError):
                server.accept()
    assert result.stdout == "PermissionError\nPermissionError\n"


def test_descriptors_can_not_be_handed_on(sandbox):
    """The kernel counts those on their way by user: who holds many would keep others from it."""
    result = run(
        sandbox,
        """
        import ctypes, socket
        one, other = socket.socketpair()
        one.send(b"x")
        print(other.recv(1))
        for action in (
            lambda: socket.send_fds(one, [b"x"], [0]),
            lambda: one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20),
            lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
            lambda: socket.socket(socket.AF_UNIX),
        ):
            try:
                action()
                print("done")
            except PermissionError:
                print("refused")
        """,
    )
    assert result.stdout.split() == ["b'x'"] + ["refused"] * 4, result.stderr


def test_names_are_not_resolved(sandbox):
    result = run(sandbox, "import urllib.request\nurllib.request.urlopen('http://example.com', timeout=1)")
    assert result.status == "error"
    assert "URLError" in result.stderr


# -- processes --------------------------------------------------------------------------------------------------------


def test_a_fork_bomb_stays_small(sandbox):
    result = run(
        sandbox,
        """
        import os, time
        def bomb():
            while True:
                try:
                    os.fork()
                except OSError:
                    pass
        bomb()
        """,
    )
    assert result.status == "timeout"


def test_processes_and_threads_are_counted(sandbox):
    forks = """
        import os, time
        for count in range(1000):
            try:
                if os.fork() == 0:
                    time.sleep(60)
            except OSError:
                break
        print(count)
    """
    threads = """
        import threading, time
        for count in range(1000):
            try:
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            except RuntimeError:
                break
        print(count)
    """
    small = LocalSandbox(replace(LIMITS, memory_bytes=512 << 20, num_processes=8))
    assert run(small, forks).stdout == "7\n"
    assert run(small, threads).stdout == "7\n"


def test_no_signal_leaves_the_jail(sandbox):
    targets = ["os.getppid()", "1", "0", "-1", "-os.getpgid(0)", "os.getsid(0)"]
    programs = [
        Program(
            f"import os, signal\ntry:\n    os.kill({target}, signal.{number})\nexcept OSError:\n    pass\nprint('done')"
        )
        for target in targets
        for number in ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP")
    ]
    # A bystander of the same user, in the trainer's process group.
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        statuses = {result.status for result in sandbox.run_many(programs)}
        assert statuses <= {"ok", "error", "timeout"}
        assert bystander.poll() is None
        assert psutil.Process(bystander.pid).status() != psutil.STATUS_STOPPED
    finally:
        bystander.kill()
        bystander.wait()


def test_killing_every_process_number_hits_nobody(sandbox):
    code = """
        import os
        killed = []
        for pid in [os.getppid(), *range(1, 70000)]:
            if pid == os.getpid():
                continue
            try:
                os.kill(pid, 9)
                killed.append(pid)
            except OSError:
                pass
        print(set(killed))
    """
    # Process 1 takes no signal from inside.
    assert run(sandbox, code).stdout == "{1}\n"


def test_no_daemon_is_left_behind(sandbox):
    marker = uuid.uuid4().hex
    code = f"""
        import os, signal, sys, time
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                        signal.signal(number, signal.SIG_IGN)
                    for descriptor in range(3):
                        os.close(descriptor)
                    loop = "import time\\nwhile True: time.sleep(1)"
                    os.execv(sys.executable, [sys.executable, "-c", loop, {marker!r}])
                os._exit(0)
        time.sleep(0.5)
        print("gone")
    """
    assert run(sandbox, code).stdout == "gone\n"
    assert processes_with(marker) == []


def test_a_daemon_that_keeps_the_output_open_does_not_keep_us(sandbox):
    start = time.monotonic()
    result = run(sandbox, "import os, time\nif os.fork() == 0:\n    time.sleep(600)\nprint('parent')")
    assert (result.status, result.stdout) == ("ok", "parent\n")
    assert time.monotonic() - start < LIMITS.wall_seconds


def test_programs_end_with_a_trainer_that_was_killed(tmp_path):
    marker = uuid.uuid4().hex
    inner = (
        f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', {marker!r}])"
    )
    script = tmp_path / "trainer.py"
    script.write_text(
        "from paceline.rewards.sandbox import LocalSandbox, Program, SandboxLimits\n"
        f"LocalSandbox(SandboxLimits(wall_seconds=60)).run_many([Program({inner!r})] * 2)\n"
    )
    trainer = subprocess.Popen([sys.executable, str(script)], cwd=REPOSITORY)
    try:
        deadline = time.monotonic() + 60
        while len(processes_with(marker)) < 2:
            assert time.monotonic() < deadline, "the programs did not start"
            time.sleep(0.1)
    finally:
        trainer.kill()
        trainer.wait()
    assert vanishes(marker)


# -- privileges -------------------------------------------------------------------------------------------------------


def test_privileges_can_not_be_had(sandbox):
    result = run(
        sandbox,
        """
        import ctypes, os, resource
        libc = ctypes.CDLL(None, use_errno=True)
        def attempt(name, action):
            try:
                if action() == -1:
                    raise OSError(ctypes.get_errno(), "")
                print("did", name)
            except (OSError, ValueError):
                pass
        attempt("setuid", lambda: os.setuid(0))
        attempt("setgroups", lambda: os.setgroups([0]))
        attempt("unshare user", lambda: libc.unshare(0x10000000))
        attempt("unshare mount", lambda: libc.unshare(0x20000))
        attempt("mount", lambda: libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None))
        attempt("mount proc", lambda: libc.mount(b"proc", b"/tmp", b"proc", 0, None))
        attempt("unmount", lambda: libc.umount2(b"/tmp", 2))
        attempt("ptrace", lambda: libc.ptrace(16, 1, 0, 0))
        attempt("namespace by clone", lambda: libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))
        attempt("clone3", lambda: libc.syscall(435, 0, 0))
        attempt("memfd", lambda: os.memfd_create("x"))
        attempt("shared memory", lambda: libc.shmget(0, 1 << 20, 0o1600))
        attempt("keyring", lambda: libc.syscall(250, 0, -3, 1))
        attempt("host name", lambda: libc.sethostname(b"x", 1))
        attempt("device", lambda: os.mknod("disk", 0o60666, os.makedev(254, 0)))
        attempt("priority", lambda: os.nice(-5))
        attempt("memory limit", lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)))
        attempt("process limit", lambda: resource.setrlimit(resource.RLIMIT_NPROC, (999, 999)))
        attempt("limits of others", lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)) and 0)
        print(os.getuid(), os.geteuid(), os.getgid())
        """,
    )
    assert (result.status, result.stdout) == ("ok", "1000 1000 1000\n"), result.stderr


def test_other_system_call_interfaces_are_deadly(sandbox):
    # x32: the numbers that the filter looks for, plus one bit.
    result = run(sandbox, "import ctypes\nprint(ctypes.CDLL(None).syscall(0x40000000 + 39))")
    assert (result.status, result.exit_code, result.stdout) == ("error", -signal.SIGSYS, "")


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "while True:\n    pass",
        "import time\ntime.sleep(600)",
        "import signal\nfor number in range(1, 65):\n    try:\n        signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\nwhile True:\n    pass",
        "import os\nfor _ in range(4):\n    os.fork()\nwhile True:\n    pass",
        "input()\nimport sys\nsys.stdin.read()\nimport threading\nthreading.Event().wait()",
        "10 ** 10 ** 10",
    ],
    ids=["loop", "sleep", "deaf_loop", "many_loops", "wait", "power"],
)
def test_endless_programs_end(sandbox, code):
    start = time.monotonic()
    result = run(sandbox, code, stdin="line\n")
    assert result.status == "timeout"
    assert time.monotonic() - start < BUSY_FACTOR * LIMITS.wall_seconds + 5


@pytest.mark.parametrize(
    "code",
    [
        "kept = []\nwhile True:\n    kept.append(bytearray(1 << 20))",
        "'x' * (1 << 40)",
        "import mmap\nkept = [mmap.mmap(-1, 1 << 24) for _ in range(10000)]",
        # Buffers of sockets, which belong to no process.
        "import os, socket, time\nkept = []\nfor _ in range(10):\n    if os.fork() == 0:\n        break\n"
        "for _ in range(50):\n    pair = socket.socketpair()\n    kept.append(pair)\n    for end in pair:\n"
        "        end.setblocking(False)\n        try:\n            while True: end.send(bytes(4096))\n"
        "        except OSError: pass\ntime.sleep(60)",
        # Each below the limit, together above it.
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        kept = bytearray(b'x') * (60 << 20)\n"
        "        time.sleep(60)\ntime.sleep(60)",
    ],
    ids=["steps", "at_once", "maps", "sockets", "family"],
)
def test_memory_bombs_are_stopped(sandbox, code):
    result = run(sandbox, code)
    assert result.status in ("memory", "error"), result
    assert result.status == "memory" or "Cannot allocate memory" in result.stderr


def test_memory_that_forked_processes_share_counts_once(sandbox):
    code = (
        "import os, time\nkept = bytearray(b'x') * (60 << 20)\nfor _ in range(6):\n    if os.fork() == 0:\n"
        "        time.sleep(0.5)\n        os._exit(0)\ntime.sleep(0.5)\nprint('fine')"
    )
    assert run(sandbox, code).stdout == "fine\n"


def test_processes_that_ended_and_were_not_waited_for_take_no_memory(sandbox):
    fork = "for _ in range(6):\n    if os.fork() == 0:\n        os._exit(0)\n"
    code = f"import os, time\n{fork}time.sleep(0.3)\nprint('fine')"
    assert run(sandbox, code).stdout == "fine\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_huge_output_is_cut_and_ends_the_program(sandbox, stream):
    result = run(sandbox, f"import sys\nwhile True:\n    sys.{stream}.write('x' * 1000)")
    assert result.status == "output"
    assert len(getattr(result, stream)) == LIMITS.output_bytes


def test_output_up_to_the_limit_is_whole(sandbox):
    result = run(sandbox, f"print('x' * {LIMITS.output_bytes - 1})")
    assert (result.status, len(result.stdout)) == ("ok", LIMITS.output_bytes)
    tiny = LocalSandbox(replace(LIMITS, output_bytes=10))
    assert run(tiny, "print('x' * 100)").stdout == "x" * 10
    assert run(tiny, "pass").ok


def test_output_that_is_no_text_is_shown_as_far_as_it_goes(sandbox):
    assert run(sandbox, r"import sys; sys.stdout.buffer.write(b'a\xffb')").stdout == "a\ufffdb"


def test_odd_source_is_an_error_of_the_program(sandbox):
    assert run(sandbox, "def (").status == "error"
    assert sandbox.run(Program("print('\ud800')")).status == "error"
    assert sandbox.run(Program("\0")).status == "error"
    assert sandbox.run(Program("(" * 10_000)).status == "error"


@pytest.mark.parametrize(
    "values",
    [{"cpu_seconds": 0}, {"wall_seconds": 0}, {"memory_bytes": 1024}, {"num_processes": 0}, {"cpu_seconds": 0.5}],
)
def test_limits_that_are_none_are_refused(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        SandboxLimits(**values)


# -- many -------------------------------------------------------------------------------------------------------------

HOSTILE = [
    "while True:\n    pass",
    "import time\ntime.sleep(600)",
    "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "kept = []\nwhile True:\n    kept.append(bytearray(1 << 20))",
    "while True:\n    print('x' * 1000)",
    "import os\nos.kill(0, 9)",
    "open('/etc/passwd')",
]


def check_a_mixed_batch(num_programs: int) -> float:
    sandbox = LocalSandbox(LIMITS)
    programs = [
        Program(HOSTILE[(number // 3) % len(HOSTILE)] if number % 3 == 0 else f"print({number} ** 2)")
        for number in range(num_programs)
    ]
    threads = threading.active_count()
    start = time.monotonic()
    results = sandbox.run_many(programs)
    elapsed = time.monotonic() - start
    for number, result in enumerate(results):
        if number % 3 == 0:
            assert result.status in ("timeout", "memory", "output", "error"), (programs[number], result)
        else:
            assert result.stdout == f"{number**2}\n", result
    assert threading.active_count() == threads
    return elapsed


def test_harmless_programs_pass_among_hostile_ones():
    check_a_mixed_batch(40)


@pytest.mark.slow
def test_harmless_programs_pass_among_many_hostile_ones():
    check_a_mixed_batch(200)


def test_programs_that_hang_wait_out_their_time_together():
    sandbox = LocalSandbox(LIMITS, num_parallel=12 * CORES)
    hanging = [Program("import time\ntime.sleep(600)")] * (10 * CORES)
    start = time.monotonic()
    results = sandbox.run_many([*hanging, Program("print('done')")])
    assert [result.status for result in results] == ["timeout"] * len(hanging) + ["ok"]
    # One after the other on each core, it would take 10 times the limit.
    assert time.monotonic() - start < 7 * LIMITS.wall_seconds


def test_no_more_run_than_may():
    sandbox = LocalSandbox(LIMITS, num_parallel=1)
    start = time.monotonic()
    results = sandbox.run_many([Program("import time\ntime.sleep(1)")] * 3)
    assert all(result.ok for result in results)
    assert time.monotonic() - start > 3


# -- faults of our own ------------------------------------------------------------------------------------------------


def test_a_jail_that_is_killed_is_no_fault_of_the_program(sandbox):
    marker = uuid.uuid4().hex
    code = (
        f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', {marker!r}])"
    )
    results: list[RunResult] = []
    thread = threading.Thread(target=lambda: results.append(run(sandbox, code)))
    thread.start()
    deadline = time.monotonic() + 30
    num_killed = 0
    while thread.is_alive() and time.monotonic() < deadline:
        for process in processes_with(marker):
            keeper = process.parent()
            if keeper is not None:
                keeper.kill()
                num_killed += 1
                assert vanishes(marker)
        time.sleep(0.02)
    thread.join()
    assert num_killed == 1 + len(PAUSES_SECONDS)
    assert results[0].status == "sandbox_error"
    assert "killed from outside" in results[0].message
