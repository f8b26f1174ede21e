"""The page in a real browser. `apt-get install chromium` brings one."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import pictures
from paceline.report.page import write_page
from tests.browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")

EVIL = "</script><img src=x onerror='window.pwned=1'><b>bold</b>"
POINTS = "[...document.querySelectorAll('#charts figure')].map(f => [f.dataset.chart, f.querySelectorAll('.curve').length, f.querySelector('.curve').getAttribute('d').match(/[ML]/g).length])"  # noqa: E501


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def run(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run, with a response that tries to be markup."""
    copy = shutil.copytree(finished_run, tmp_path_factory.mktemp("evil") / "first")
    with (copy / "samples/4.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "training", "prompt": "p", "response": EVIL, "score": 1.0}) + "\n")
    return copy


def test_a_page_of_one_run(browser: Browser, run: Path) -> None:
    write_page([run], run / "report.html")
    browser.open(run / "report.html")
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert browser.run("document.getElementById('title').textContent") == "first"
    assert "finished" in browser.run("document.getElementById('summary-table').textContent")

    charts = {title: (curves, points) for title, curves, points in browser.run(POINTS)}
    assert charts["Reward"] == (2, 4)
    assert charts["Validation"] == (1, 3)
    assert charts["KL divergence"][1] == 4
    assert {"Entropy", "Response length (tokens)", "Policy loss", "Value loss", "Seconds per step"} <= set(charts)

    assert browser.run(
        "window.pwned === undefined && document.querySelector('#samples-list img, #samples-list b') === null"
    )
    assert EVIL in browser.run("document.getElementById('samples-list').textContent")
    config = browser.run("document.getElementById('config-table').textContent")
    assert "trainer.placement.name" in config
    assert "trainer.nnodes" not in config
    browser.run("document.getElementById('config-all').click()")
    assert "trainer.nnodes" in browser.run("document.getElementById('config-table').textContent")
    assert "global_step_4" in browser.run("document.getElementById('checkpoints-table').textContent")
    assert "packages.torch" in browser.run("document.getElementById('environment-table').textContent")
    assert browser.errors == []


@pytest.mark.slow
def test_pictures_are_taken_of_a_report(browser: Browser, run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["pictures", "--run", str(run), "--output", str(tmp_path)])
    assert pictures.main() == 0
    for name in ("report.png", "report_step.png"):
        content = (tmp_path / name).read_bytes()
        width, height = struct.unpack(">II", content[16:24])
        assert content[:4] == b"\x89PNG"
        assert width == pictures.WIDTH
        assert height > 300
        assert len(content) > 10_000
    monkeypatch.setattr(sys, "argv", ["pictures", "--small"])
    with pytest.raises(SystemExit):
        pictures.main()
    assert "--small makes no pictures for docs/images" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["pictures", "--output", str(tmp_path)])
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 9.0, 9.0))
    with pytest.raises(SystemExit):
        pictures.main()
    assert "the machine is busy" in capsys.readouterr().err


def test_the_step_of_gantt_and_samples_can_be_chosen(browser: Browser, run: Path) -> None:
    write_page([run], run / "report.html")
    browser.open(run / "report.html")
    drawn = "[...document.querySelectorAll('#gantt .bar:not(.other) title')].map(t => t.textContent)"
    step = "document.querySelector('#gantt svg').dataset.step"
    assert browser.run(step) == "4"
    last = browser.run(drawn)
    assert any(title.startswith("update_critic") for title in last)
    browser.run("document.getElementById('gantt-previous').click()")
    assert browser.run(step) == "3"
    assert browser.run(drawn) != last
    browser.set("gantt-step", "1")
    assert browser.run(step) == "1"
    assert "critic_pool" in browser.run("document.getElementById('pools').textContent")
    browser.set("samples-step", "0")
    assert browser.run(
        "[...new Set([...document.querySelectorAll('.sample .faint')].map(n => n.textContent.split(' ')[0]))]"
    ) == ["validation"]
    browser.set("smoothing", 0.6, event="input")
    assert browser.run("document.querySelectorAll('#charts .raw').length") > 5
    assert browser.errors == []


def test_the_chart_is_read_by_keyboard(browser: Browser, run: Path) -> None:
    write_page([run], run / "report.html")
    browser.open(run / "report.html")
    browser.run("document.querySelector('#charts svg').focus()")
    press = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'Home'}))"
    browser.run(press)
    assert browser.run("document.querySelector('#charts .reading').textContent").startswith(
        "step 1: critic/score/mean "
    )
    assert browser.run("document.querySelector('#charts svg').getAttribute('aria-label')").startswith("Reward. ")


def test_a_page_that_compares(browser: Browser, run: Path) -> None:
    other = shutil.copytree(run, run.parent / "second")
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("critic_warmup: 0", "critic_warmup: 3"))
    lines = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:40])
    page = run.parent / "compare.html"
    write_page([run, other], page)
    browser.open(page)
    assert browser.errors == []
    assert browser.run("document.getElementById('title').textContent") == "first · second"
    legend = "[...document.querySelectorAll('#legend li')].map(item => item.textContent)"
    assert browser.run(legend) == ["first (critic_warmup=0)", "second (critic_warmup=3)"]
    assert "differs in" in browser.run("document.getElementById('summary-table').textContent")
    charts = {title: curves for title, curves, _ in browser.run(POINTS)}
    assert charts["Reward: critic/score/mean"] == 2, "a curve of each run"
    config_text = browser.run("document.getElementById('config-table').textContent")
    assert "trainer.critic_warmup" in config_text
    assert "trainer.placement.name" not in config_text, "only what differs between the runs"
    browser.set("gantt-run", "1")
    assert browser.run("document.querySelector('#gantt svg').dataset.step") == "2"


def test_every_metric_of_a_chart_is_compared(browser: Browser, tmp_path: Path) -> None:
    """Also one that only one of the runs has."""
    runs = {"first": {"actor/ppo_kl": 0.1, "actor/kl_loss": 0.2}, "second": {"actor/ppo_kl": 0.3}}
    for name, metrics in runs.items():
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, **metrics}) + "\n" for step in (1, 2)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    write_page([tmp_path / name for name in runs], tmp_path / "compare.html")
    browser.open(tmp_path / "compare.html")
    assert browser.errors == []
    assert {title: curves for title, curves, _ in browser.run(POINTS)} == {
        "KL divergence: actor/ppo_kl": 2,
        "KL divergence: actor/kl_loss": 1,
    }


def test_curves_that_are_equal_are_said_to_be(browser: Browser, tmp_path: Path) -> None:
    for name, entropy in {"first": 0.1, "second": 0.1, "third": 0.2}.items():
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "actor/ppo_kl": 0.3, "actor/entropy": entropy}) + "\n" for step in (1, 2)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    write_page([tmp_path / name for name in ("first", "second", "third")], tmp_path / "compare.html")
    browser.open(tmp_path / "compare.html")
    notes = "[...document.querySelectorAll('#charts figure')].map(f => [f.dataset.chart, f.querySelector('.equal')?.textContent ?? null])"  # noqa: E501
    assert dict(browser.run(notes)) == {
        "KL divergence: actor/ppo_kl": "The same values in all runs.",
        "Entropy: actor/entropy": "The same values: first and second.",
    }
    assert browser.run("document.querySelectorAll('#charts .over').length") == 3, "dashed, so that all are seen"


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_can_be_read_on_a_phone_and_on_a_laptop(
    browser: Browser, run: Path, tmp_path: Path, width: int
) -> None:
    other = shutil.copytree(run, tmp_path / "other")
    screen = {"height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.call("Emulation.setDeviceMetricsOverride", width=width, **screen)
    try:
        for runs in ([run], [run, other]):
            write_page(runs, tmp_path / "page.html")
            browser.open(tmp_path / "page.html")
            assert browser.run("document.documentElement.scrollWidth") <= width
            height = browser.run("document.documentElement.scrollHeight")
            assert height < (20_000 if width == 390 else 10_000)
            # A cell that is squeezed has a word or less in a line.
            squeezed = (
                "[...document.querySelectorAll('td')].filter(c => c.textContent.length > 8 && c.clientWidth < 60)"
            )
            assert browser.run(f"{squeezed}.map(c => c.textContent)") == []
            letters = "document.querySelector('#gantt svg text').getBoundingClientRect().height"
            assert browser.run(letters) > 8, "the names of pools can be read"
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


def test_a_run_that_has_only_begun(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer:\n  seed: 3\n")
    write_page([tmp_path], tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    assert browser.errors == []
    assert "No step has been logged yet" in browser.run("document.getElementById('charts').textContent")
    assert "no timeline yet" in browser.run("document.getElementById('gantt').textContent")
