"""The client of a remote sandbox, against a real HTTP server that misbehaves on demand."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.rewards.sandbox import Program, RemoteSandbox, SandboxLimits
from paceline.rewards.sandbox import remote as remote_module
from paceline.rewards.score import code

LIMITS = SandboxLimits(wall_seconds=5, output_bytes=1 << 16)
Misbehaviour = Callable[[BaseHTTPRequestHandler], None]


class Service(ThreadingHTTPServer):
    """Runs what it is sent, in a plain process (the tests send nothing bad), after the misbehaviours it was told."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.misbehave: list[Misbehaviour] = []
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.at_once = self.most_at_once = 0
        self.pause_seconds = 0.0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    server: Service
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(request)
            self.server.paths.append(self.path)
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
            misbehaviour = self.server.misbehave.pop(0) if self.server.misbehave else None
        time.sleep(self.server.pause_seconds)
        result = execute(request) if misbehaviour is None else None
        with self.server.lock:  # before the answer, after which a client may send the next request
            self.server.at_once -= 1
        if misbehaviour is not None:
            misbehaviour(self)
        else:
            self.answer(200, result)

    def answer(self, status: int, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


def execute(request: dict[str, Any]) -> dict[str, Any]:
    """As SandboxFusion answers."""
    start = time.monotonic()
    run: dict[str, Any] = {"status": "Finished", "return_code": 0, "stdout": "", "stderr": ""}
    try:
        # The service puts the code in a file, and so do we: programs may look for theirs.
        with tempfile.TemporaryDirectory() as folder:
            (path := Path(folder, "main.py")).write_text(request["code"])
            done = subprocess.run(
                [sys.executable, path], input=request["stdin"], capture_output=True, text=True, cwd=folder,
                timeout=request["run_timeout"],
            )  # fmt: skip
        run.update(return_code=done.returncode if done.returncode >= 0 else 1, stdout=done.stdout, stderr=done.stderr)
    except subprocess.TimeoutExpired as error:
        run.update(status="TimeLimitExceeded", return_code=None, stdout=(error.stdout or b"").decode())
    run["execution_time"] = time.monotonic() - start
    status = "Success" if run["return_code"] == 0 else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": run, "files": {}}


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield service
    service.shutdown()
    service.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(remote_module, "FIRST_PAUSE_SECONDS", 0.01)


def client(service: Service, **kwargs: Any) -> RemoteSandbox:
    return RemoteSandbox(service.url, limits=kwargs.pop("limits", LIMITS), **kwargs)


def test_a_program_is_posted_and_its_result_read(service):
    result = client(service).run(Program("import sys\nprint(input() + 'é')\nprint('noted', file=sys.stderr)", "in\n"))
    assert (result.status, result.exit_code, result.stdout, result.stderr) == ("ok", 0, "iné\n", "noted\n")
    assert result.seconds > 0
    assert service.paths == ["/run_code"]
    assert service.requests[0]["language"] == "python"
    assert service.requests[0]["run_timeout"] == 5
    assert service.requests[0]["memory_limit_MB"] == 512


def test_failures_of_programs_are_results_and_not_tried_again(service):
    sandbox = client(service, limits=SandboxLimits(wall_seconds=1))
    assert sandbox.run(Program("raise SystemExit(3)")).exit_code == 3
    assert sandbox.run(Program("1 / 0")).status == "error"
    assert sandbox.run(Program("raise MemoryError")).status == "memory"
    assert sandbox.run(Program("import time\nprint('early', flush=True)\ntime.sleep(60)")).status == "timeout"
    assert len(service.requests) == 4


def test_too_much_output_is_cut(service):
    result = client(service).run(Program("print('x' * 100_000)"))
    assert (result.status, len(result.stdout)) == ("output", LIMITS.output_bytes)


def hang_up(handler: Handler) -> None:
    handler.close_connection = True
    handler.connection.close()


def half_an_answer(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"status": ')
    handler.close_connection = True


MISBEHAVIOURS: dict[str, Misbehaviour] = {
    "busy": lambda handler: handler.answer(429, {}),
    "unavailable": lambda handler: handler.answer(503, b"starting"),
    "crashed": lambda handler: handler.answer(500, b"Internal Server Error"),
    "hang_up": hang_up,
    "half_an_answer": half_an_answer,
    "no_json": lambda handler: handler.answer(200, b"<html>"),
    "no_object": lambda handler: handler.answer(200, [1]),
    "sandbox_error": lambda handler: handler.answer(200, {"status": "SandboxError", "message": "no container"}),
    "no_result": lambda handler: handler.answer(200, {"status": "Success", "run_result": None}),
    "unknown_status": lambda handler: handler.answer(200, {"status": "Failed", "run_result": {"status": "Lost"}}),
    "own_error": lambda handler: handler.answer(200, {"status": "Failed", "run_result": {"status": "Error"}}),
}


@pytest.mark.parametrize("misbehaviour", MISBEHAVIOURS.values(), ids=MISBEHAVIOURS)
def test_failures_of_the_service_are_tried_again(service, misbehaviour):
    service.misbehave = [misbehaviour] * 2
    assert client(service, retries=2).run(Program("print(1)")).stdout == "1\n"
    assert len(service.requests) == 3


@pytest.mark.parametrize("misbehaviour", MISBEHAVIOURS.values(), ids=MISBEHAVIOURS)
def test_a_service_that_goes_on_failing_is_a_sandbox_error(service, misbehaviour):
    service.misbehave = [misbehaviour] * 10
    result = client(service, retries=1).run(Program("print(1)"))
    assert result.status == "sandbox_error"
    assert "2 attempts" in result.message
    assert service.url in result.message
    assert len(service.requests) == 2


def test_what_another_attempt_can_not_change_is_not_tried_again(service):
    service.misbehave = [lambda handler: handler.answer(404, b"no such page")]  # type: ignore[attr-defined]
    result = client(service).run(Program("print(1)"))
    assert result.status == "sandbox_error"
    assert "404" in result.message
    assert "no such page" in result.message
    assert len(service.requests) == 1


def test_code_is_not_sent_where_a_redirect_leads(service):
    def redirect(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(307)
        handler.send_header("Location", f"{service.url}/elsewhere")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    service.misbehave = [redirect]
    assert client(service).run(Program("print(1)")).status == "sandbox_error"
    assert service.paths == ["/run_code"]


def test_nobody_there_is_a_sandbox_error_soon():
    sandbox = RemoteSandbox("http://127.0.0.1:9", retries=1, limits=LIMITS)
    start = time.monotonic()
    result = sandbox.run(Program("print(1)"))
    assert result.status == "sandbox_error"
    assert "refused" in result.message
    assert time.monotonic() - start < 5


def silent(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(3)


def trickle(handler: BaseHTTPRequestHandler) -> None:
    """A byte now and then: each read is in time, the whole never comes."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(15):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.2)


@pytest.mark.parametrize("misbehaviour", [silent, trickle])
def test_an_attempt_has_a_deadline(service, misbehaviour):
    service.misbehave = [misbehaviour]
    sandbox = client(service, timeout_seconds=1.0, retries=0, limits=SandboxLimits(wall_seconds=1))
    start = time.monotonic()
    result = sandbox.run(Program("print(1)"))
    assert result.status == "sandbox_error"
    assert time.monotonic() - start < 2.5


def test_an_endless_answer_is_cut_off(service):
    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(b"x" * (1 << 16))

    service.misbehave = [endless]
    result = client(service, retries=0).run(Program("print(1)"))
    assert result.status == "sandbox_error"
    assert "longer than" in result.message


def test_no_more_are_sent_at_a_time_than_allowed(service):
    service.pause_seconds = 0.1
    results = client(service, concurrency=3).run_many([Program(f"print({number})") for number in range(9)])
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(9)]
    assert service.most_at_once == 3


def test_the_limit_holds_for_all_threads_together(service):
    service.pause_seconds = 0.1
    sandbox = client(service, concurrency=2)
    threads = [threading.Thread(target=sandbox.run_many, args=([Program("pass")] * 3,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(service.requests) == 9
    assert service.most_at_once == 2


def test_one_failure_among_many_leaves_the_others(service):
    service.misbehave = [lambda handler: handler.answer(404, b"")]  # type: ignore[attr-defined]
    results = client(service, concurrency=2).run_many([Program("print(1)")] * 6)
    assert sorted(result.status for result in results) == ["ok"] * 5 + ["sandbox_error"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"url": "sandbox:8080"}, "http://sandbox:8080"),
        ({"url": "http://sandbox", "concurrency": 0}, "concurrency=0"),
        ({"url": "http://sandbox", "retries": -1}, "retries=-1"),
        ({"url": "http://sandbox", "timeout_seconds": 1.0}, "shorter than a program may run"),
    ],
)
def test_settings_that_can_not_work_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        RemoteSandbox(**values)


@pytest.mark.parametrize("url", ["http://sandbox:8080", "http://sandbox:8080/", "http://sandbox:8080/run_code"])
def test_the_address_is_completed(url):
    assert RemoteSandbox(url).url == "http://sandbox:8080/run_code"


def test_code_is_scored_through_the_service(service):
    programs = [
        "a, b = map(int, input().split())\nprint(a + b)",
        "a, b = map(int, input().split())\nprint(3)",
        "import sys\nsys.exit(0)",
    ]
    tests = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}
    asserts = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]
    calls = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}
    solutions = [*programs, *["def add(a, b): return a + b"] * 2, "def add(a, b): return 3"]
    truths = [tests, tests, tests, asserts, calls, asserts]
    results = code.compute_scores(
        [f"```python\n{solution}\n```" for solution in solutions], truths, [None] * 6, sandbox=client(service)
    )
    assert [result["score"] for result in results] == [1.0, 0.5, 0.0, 1.0, 1.0, 0.5]


def test_a_service_that_is_down_is_a_grader_error(service):
    service.misbehave = [lambda handler: handler.answer(503, b"")] * 2  # type: ignore[attr-defined]
    [result] = code.compute_scores(["```python\npass\n```"], ["assert f()"], [None], sandbox=client(service, retries=1))
    assert isinstance(result, RuntimeError)
    assert "503" in str(result)
