"""What the live page costs, and how late it is: `paceline report --serve` beside the files of a run, in Chromium.

A run's own writers leave a step a second, with the calls, samples and metrics of a PPO step; then as many steps as
asked, at once; then a step a second again. Measured are the seconds from a step's line to its point on the screen, the
share of a core that the server takes, and what server and page hold.

    python -m benchmarks.live_page
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from omegaconf import OmegaConf

from benchmarks.table import remark, report
from paceline.config.load import load_config
from paceline.report.samples import SampleFiles
from paceline.run_folder import SAMPLES_FOLDER
from paceline.single_controller.base import CallRecord
from paceline.trainer.run_records import RunRecords
from tests.browser import CHROMIUM, Browser

METHODS = ("generate_sequences", "compute_log_prob", "compute_ref_log_prob", "compute_values", "update_critic")
METRICS, SAMPLES, TOKENS = 60, 4, 128
LIMIT_SECONDS = 120
POINT = "[...document.querySelectorAll('[data-chart=Reward] svg')].some(svg => svg.getAttribute('aria-label').includes(' to {}, least'))"  # noqa: E501


class WritingRun:
    """Leaves the records of a run that only says to have trained."""

    def __init__(self, folder: Path) -> None:
        self.step = 0
        self._calls: list[CallRecord] = []
        cfg = load_config(OmegaConf.create({"trainer": {"logger": [], "default_local_dir": str(folder)}}))
        self._records = RunRecords(
            folder, cfg, resume_step=None, step=0, total_steps=10**6, pools=["global_pool"],
            pool_of_role={"actor": "global_pool"}, drain_call_records=self._drain,
            running_calls=lambda: {"actor": "update_actor"},
        )  # fmt: skip
        self._samples = SampleFiles(folder / SAMPLES_FOLDER, SAMPLES, None)

    def _drain(self) -> list[CallRecord]:
        calls, self._calls = self._calls, []
        return calls

    @staticmethod
    def score_of(step: int) -> float:
        """Four digits, which no step nearby has too."""
        return (1000 + step % 9000) / 10_000

    def write_step(self) -> None:
        """A step of half a second."""
        self.step += 1
        self._records.begin_step(self.step)
        now = time.time()
        self._calls += [
            CallRecord(
                pool="global_pool", process_roles="actor", role="actor", rank=0, pid=os.getpid(), node="localhost",
                method=method, start=now - 0.5 + 0.1 * place, end=now - 0.41 + 0.1 * place, tag={"step": self.step},
            )
            for place, method in enumerate(METHODS)
        ]  # fmt: skip
        tokens = [[f"word{place}", -0.5, 0.25, 1] for place in range(TOKENS)]
        row = {"prompt": "p" * 200, "response": "r" * 500, "score": 1.0, "tokens": tokens}
        self._samples.write(self.step, [row] * SAMPLES)
        seconds, idle = self._records.step_seconds(self.step)
        metrics = {f"training/metric_{place}": place + self.step / 1e6 for place in range(METRICS)}
        metrics |= {f"timing_s/{name}": value for name, value in seconds.items()} | idle
        self._records.write_line(self.step, metrics | {"critic/score/mean": self.score_of(self.step)})

    def close(self) -> None:
        self._records.end("finished")
        self._records.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="steps that are left at once (10000)")
    parser.add_argument("--seconds", type=int, default=60, help="steps, one a second, before and after them (60)")
    args = parser.parse_args()
    if CHROMIUM is None:
        parser.error("there is no chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run = WritingRun(folder / "run")
        run.write_step()
        with served(folder / "run") as (server, address):
            browser = Browser(folder / "browser")
            try:
                browser.go(address)
                wait_for(browser, run)
                measure(browser, run, server, args.steps, args.seconds)
            finally:
                browser.close()
                run.close()


def measure(browser: Browser, run: WritingRun, server: psutil.Process, steps: int, seconds: int) -> None:
    late, shares, held = {}, {}, {}
    a_fifth = max(1, steps // 5)
    for name, at_once in (("at first", 0), (f"after {a_fifth:,} steps", a_fifth), (f"after {steps:,} steps", steps)):
        while run.step < at_once:
            run.write_step()
        wait_for(browser, run)
        late[name], shares[name] = follow(browser, run, server, seconds)
        held[name] = (server.memory_info().rss / 1e6, *page_size(browser))
    report("from a step's line to the screen", late, "s", of=None)
    report(
        "paceline report --serve, share of a core",
        {name: [100 * share] for name, share in shares.items()},
        "%",
        of=None,
    )
    sizes = {"memory of the server": "MB", "memory of the page": "MB", "elements of the page": "nodes"}
    for place, (what, unit) in enumerate(sizes.items()):
        report(what, {name: [measured[place]] for name, measured in held.items()}, unit, of=None)
    slowest = max(value for values in late.values() for value in values)
    remark(
        f"A step is on the live page after {statistics.median(late['at first']):.1f} s, at most {slowest:.1f} s; its "
        f"server takes {max(shares.values()):.2%} of a core at most."
    )
    if browser.errors:
        raise RuntimeError(f"the page complains: {browser.errors[:3]}")


def follow(browser: Browser, run: WritingRun, server: psutil.Process, seconds: int) -> tuple[list[float], float]:
    """Seconds of each of so many steps, one a second, until it is shown; and the server's share of a core meanwhile."""
    late = []
    used, began = sum(server.cpu_times()[:2]), time.monotonic()
    for place in range(seconds):
        due = began + place * 1.03  # drifts against the server's looks, so that no step always comes just before one
        time.sleep(max(0.0, due - time.monotonic()))
        run.write_step()
        late.append(wait_for(browser, run))
    time.sleep(max(0.0, began + seconds * 1.03 - time.monotonic()))
    return late, (sum(server.cpu_times()[:2]) - used) / (time.monotonic() - began)


def wait_for(browser: Browser, run: WritingRun) -> float:
    """Seconds until the newest step's point is drawn."""
    script = POINT.format(float(f"{run.score_of(run.step):.4g}"))
    start = time.monotonic()
    while not browser.run(script):
        if time.monotonic() - start > LIMIT_SECONDS:
            raise RuntimeError(f"step {run.step} is not on the page after {LIMIT_SECONDS} s: {browser.errors[:3]}")
        time.sleep(0.02)
    return time.monotonic() - start


def page_size(browser: Browser) -> tuple[float, float]:
    """MB and nodes, without garbage."""
    browser.call("HeapProfiler.collectGarbage")
    browser.call("Performance.enable")
    found = {metric["name"]: metric["value"] for metric in browser.call("Performance.getMetrics")["metrics"]}
    return found["JSHeapUsedSize"] / 1e6, found["Nodes"]


@contextmanager
def served(folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """The process of `paceline report --serve`, and the address that it prints."""
    code = "import sys; from paceline.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "report", str(folder), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield psutil.Process(process.pid), process.stdout.readline().strip()
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
