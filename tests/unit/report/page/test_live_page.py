"""The live page: what is new in a run's folder, who may ask for it, and how a browser shows it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.report.page.follow import Follower
from paceline.report.page.page_server import PageServer
from paceline.report.page.read import Limits
from tests.browser import CHROMIUM, Browser

EVIL = "</script><img src=x onerror='window.pwned=1'><b>bold</b>"
TURNS = [{"by": "model", "text": "1<b>", "tokens": 2}, {"by": "read", "text": EVIL, "tokens": 1}]
TOKENS = [["1", -0.5, 0.25, 1], ["<b>", -1.5, -0.5, 1], ["tool", None, None, 0]]


OWN_PROCESS = {"driver": os.getpid()}


def add_step(run: Path, step: int, score: float = 0.5) -> None:
    """What a run writes at the end of a step."""
    rows = [{"response": EVIL, "tokens": TOKENS}, {"turns": TURNS, "tokens": TOKENS}]
    (run / "samples" / f"{step}.jsonl").write_text(
        "".join(json.dumps({"kind": "training", "prompt": "p", "score": 1.0, **row}) + "\n" for row in rows)
    )
    span = {"ph": "X", "name": "generate_sequences", "pid": 1, "tid": 1, "ts": step * 1e6, "dur": 5e5}
    span["args"] = {"pool": "global_pool", "role": "actor", "rank": 0, "step": step}
    content = (run / "timeline.json").read_bytes()
    assert content.endswith(b"\n]}\n")
    (run / "timeline.json").write_bytes(content[:-4] + b",\n" + json.dumps(span).encode() + b"\n]}\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "critic/score/mean": score, "actor/pg_loss": "NaN"}) + "\n")


def set_status(run: Path, **changes: object) -> None:
    status = json.loads((run / "status.json").read_text())
    now = {"state": "running", "updated": time.time(), "running": {"global_pool": "update_actor"}}
    now["host"] = socket.gethostname()
    (run / "status.json").write_text(json.dumps(status | now | changes))


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished_run, tmp_path / "live")


@pytest.fixture
def server(run: Path) -> Iterator[PageServer]:
    serving = PageServer([run])
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    yield serving
    serving.close()


def test_only_what_is_new_is_told(run: Path) -> None:
    follower = Follower(run, Limits())
    first = {change["kind"] for change in follower.changes()}
    assert "line" not in first
    assert list(follower.changes()) == []
    add_step(run, 5)
    changes = {change["kind"]: change for change in follower.changes()}
    assert changes["line"]["line"] == {"step": 5, "critic/score/mean": 0.5, "actor/pg_loss": None}
    assert changes["gantt"]["step"]["bars"][-1][:2] == ("global_pool", "generate_sequences")
    assert changes["samples"]["rows"][0]["tokens"] == TOKENS
    with (run / "alarms.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "alarms": ["actor/grad_norm is 9"]}) + "\n")
    assert [change["kind"] for change in follower.changes()] == ["alarms"]


def test_a_run_that_is_resumed_is_read_anew(run: Path) -> None:
    follower = Follower(run, Limits())
    list(follower.changes())
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:-2]))
    assert list(follower.changes()) == [{"kind": "reload"}]


def test_a_long_run_costs_no_more_to_follow(run: Path) -> None:
    for step in range(5, 8):
        add_step(run, step)
    follower = Follower(run, Limits())
    list(follower.changes())
    lines = "".join(json.dumps({"step": step, "critic/score/mean": 0.1}) + "\n" for step in range(8, 10_000))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(lines)
    assert len(list(follower.changes())) == 10_000 - 8
    start = time.process_time()
    for _ in range(100):
        list(follower.changes())
    assert (time.process_time() - start) / 100 < 0.005  # of a look, of which there are two a second
    assert len(follower._calls.by_step) <= 2


def test_a_run_that_is_not_there_for_a_moment_is_waited_for(
    server: PageServer, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As when it is started anew: its files are put aside before there are others."""
    moved = run.rename(run.with_name("moved"))
    with urllib.request.urlopen(f"{server.address}events", timeout=10) as response:
        assert response.read() == b""
    moved.rename(run)
    with urllib.request.urlopen(f"{server.address}events", timeout=10) as response:
        assert response.readline() == b"event: data\n"
    assert "Traceback" not in capfd.readouterr().err


def fetch(address: str, method: str = "GET", **headers: str) -> int:
    request = urllib.request.Request(address, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def test_nothing_is_said_without_the_token(server: PageServer, run: Path) -> None:
    base = f"http://127.0.0.1:{server.server_port}"
    assert fetch(server.address) == 200
    assert fetch(f"{base}/") == fetch(f"{base}/events") == fetch(f"{base}/{'x' * 32}/") == 404
    assert fetch(server.address, Host="evil.example") == 404  # another name for this machine
    assert fetch(f"{base}/wrong/stop/0", "POST") == fetch(f"{server.address}stop/1", "POST") == 404
    assert fetch(f"{server.address}stop/../0", "POST") == fetch(f"{server.address}metrics.jsonl") == 404
    assert not (run / "stop").exists()
    assert fetch(f"{server.address}checkpoint/0", "POST") == 204
    assert (run / "checkpoint").exists()
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
def test_runs_are_compared_while_they_go_on(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    runs = [run, shutil.copytree(run, run.with_name("other"))]
    serving = PageServer(runs)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    browser = Browser(tmp_path_factory.mktemp("browser"))
    try:
        browser.go(serving.address)
        wait_for(browser, "document.documentElement.dataset.ready === 'yes'")
        add_step(runs[1], 5, score=0.8125)
        label = "document.querySelector('#charts svg').getAttribute('aria-label')"
        wait_for(browser, f"{label}.includes('other') && {label}.includes('0.8125')")
        assert browser.run("document.querySelectorAll('#now-runs [data-asked=stop]').length") == 2
        assert browser.errors == []
    finally:
        browser.close()
        serving.close()


def wait_for(browser: Browser, script: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not browser.run(script):
        assert time.monotonic() < deadline, (script, browser.errors)
        time.sleep(0.05)


def text_of(name: str) -> str:
    return f"document.getElementById('{name}').textContent"


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
def test_a_browser_follows_a_run(
    server: PageServer, run: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    set_status(run)
    browser = Browser(tmp_path_factory.mktemp("browser"))
    try:
        browser.go(server.address)
        wait_for(browser, "document.documentElement.dataset.ready === 'yes'")
        assert browser.run("document.querySelectorAll('#charts figure').length") > 5
        assert "running, step" in browser.run(text_of("now-runs"))
        set_status(run, queue={"sampling": 12, "ended": 4}, waits="training", deaths=2, processes=OWN_PROCESS)
        wait_for(browser, f"{text_of('now-runs')}.includes('prompts: 12 sampling, 4 ended · the training waits')")
        assert "died 2 times before" in browser.run(text_of("now-runs"))
        wait_for(browser, f"{text_of('processes')}.includes('{os.getpid()}')")

        # A step is on the screen within two seconds, and nothing of it becomes markup.
        start = time.monotonic()
        add_step(run, 5, score=0.875)
        wait_for(
            browser, "document.querySelector('[data-chart=Reward] svg').getAttribute('aria-label').includes('0.875')"
        )
        seconds = time.monotonic() - start
        assert seconds < 4  # 2 on a quiet machine
        wait_for(browser, "document.querySelector('#gantt svg').dataset.step === '5'")
        wait_for(browser, f"{text_of('samples-list')}.includes('onerror')")
        assert browser.run("window.pwned === undefined && document.querySelector('#samples-list img') === null")

        # Tokens, by pointer and by keyboard.
        pointed = "dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
        browser.run(f"document.querySelectorAll('.token')[1].{pointed}")
        reading = "document.querySelector('.tokens + .reading').textContent"
        assert browser.run(reading).startswith('token 1 "<b>": log-prob -1.5, probability 0.2231, advantage -0.5')
        browser.run("document.querySelector('.tokens').focus()")
        browser.run(
            "document.querySelector('.tokens').dispatchEvent(new KeyboardEvent('keydown', {key: 'End', bubbles: true}))"
        )
        assert "not written by the policy" in browser.run(reading)

        # A conversation: what was read is told apart, and its tokens are read in the same way.
        conversation = "document.querySelectorAll('#samples-list .sample')[1]"
        assert browser.run(f"[...{conversation}.querySelectorAll('.label')].map(label => label.textContent)") == [
            "prompt",
            "model · 2 tokens",
            "read, not trained · 1 tokens",
            "tokens",
        ]
        browser.run(f"{conversation}.querySelectorAll('.token')[2].{pointed}")
        of_conversation = f"{conversation}.querySelector('.tokens + .reading').textContent"
        assert "advantage none, not written by the policy: mask 0" in browser.run(of_conversation)

        # A step that was chosen stays while others come.
        browser.set("gantt-step", "2")
        add_step(run, 6)
        wait_for(browser, "[...document.getElementById('gantt-step').options].some(option => option.value === '6')")
        assert browser.run("document.querySelector('#gantt svg').dataset.step") == "2"

        # Buttons: the second press counts for the stop.
        browser.run("document.querySelector('[data-asked=checkpoint]').click()")
        browser.run("document.querySelector('[data-asked=stop]').click()")
        assert "Press again" in browser.run(text_of("now-runs"))
        assert not (run / "stop").exists()
        browser.run("document.querySelector('[data-asked=stop]').click()")
        deadline = time.monotonic() + 10
        while not ((run / "stop").exists() and (run / "checkpoint").exists()):
            assert time.monotonic() < deadline
            time.sleep(0.05)

        # Ten thousand steps leave the page as large as it is.
        steps = "for (let step = 100; step < 10100; step++) addLine(RUNS[0], {step, 'critic/score/mean': 1});"
        assert browser.run(f"{steps} series(RUNS[0], 'critic/score/mean').steps.length") <= 1000

        # Alarms, the log, and a run that goes on from a checkpoint.
        with (run / "alarms.jsonl").open("a") as file:
            file.write(json.dumps({"step": 6, "alarms": ["actor/grad_norm is 9"]}) + "\n")
        wait_for(browser, f"{text_of('alarms-list')}.includes('step 6: actor/grad_norm is 9')")
        lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        (run / "metrics.jsonl").write_bytes(b"".join(lines[:3]))
        wait_for(
            browser,
            "document.querySelector('[data-chart=Reward] svg').getAttribute('aria-label').includes('0.875') === false",
        )
        set_status(run, state="failed", error="WorkerError: gone")
        wait_for(browser, f"{text_of('summary-table')}.includes('failed: WorkerError: gone')")

        # Narrow and dark.
        browser.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
        assert browser.run("document.documentElement.scrollWidth") <= 360
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
        assert [error for error in browser.errors if "favicon" not in error] == []
        assert {url.split("/")[2] for url in browser.requests if url.startswith("http")} == {
            f"127.0.0.1:{server.server_port}"
        }
    finally:
        browser.close()
