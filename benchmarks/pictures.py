"""Makes the pictures of README and docs anew, from runs on this machine, which has to be quiet.

placements.svg is drawn by `benchmarks.placements`; report.png and report_step.png are Chromium's pictures of the report
of a quickstart in split placement. The two of SmolLM2 are of runs of hours: docs/smollm2.md has their commands.

    python -m benchmarks.pictures --output docs/images
    python -m benchmarks.pictures --small --output /tmp/pictures        to see in minutes that all of it works
"""

from __future__ import annotations

import argparse
import base64
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.report.page import write_page
from tests.browser import CHROMIUM, Browser

MOST_LOAD = 0.5
"""Of the last minute: with more, other work would be in the pictures."""
WIDTH = 1200
DOCS = Path("docs/images")
SMALL_RUNS = ("--responses", "8", "--tokens", "16", "--hidden", "64")
SMALL_QUICKSTART = (
    "trainer.total_training_steps=10",
    "data.train_batch_size=32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
)
STEP_OF_QUICKSTART = "[...document.getElementById('gantt-step').options].map(option => option.value).find(step => step % 10 === 0 && step > 0)"  # noqa: E501


def main() -> int:
    """Make them, or say why not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DOCS, help="folder of the pictures (docs/images)")
    parser.add_argument("--run", type=Path, help="picture the report of this run, and make no runs")
    parser.add_argument("--small", action="store_true", help="of tiny runs, which show nothing: not for the docs")
    parser.add_argument("--anyway", action="store_true", help="also on a machine that is busy")
    args = parser.parse_args()
    if CHROMIUM is None:
        parser.error("there is no chromium: apt-get install chromium")
    load = os.getloadavg()[0]
    if args.small and args.output.resolve() == DOCS.resolve():
        parser.error(f"--small makes no pictures for {DOCS}: set --output.")
    if load > MOST_LOAD and not (args.anyway or args.small) and args.run is None:
        parser.error(f"the machine is busy: its load is {load:.1f}, more than {MOST_LOAD}. Wait, or say --anyway.")
    args.output.mkdir(parents=True, exist_ok=True)
    if args.run is not None:
        picture_report(args.run, args.output)
        return 0
    placements = args.output / "placements.svg"
    drawing = [sys.executable, "-m", "benchmarks.placements", "--output", str(placements)]
    subprocess.run([*drawing, *(SMALL_RUNS if args.small else ())], check=True)
    with tempfile.TemporaryDirectory() as folder:
        code = "import sys; from paceline.cli import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, "quickstart", "--placement", "split"]
        command += SMALL_QUICKSTART if args.small else ()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        subprocess.run(command, check=True, cwd=folder, env=environment)
        [run] = {path.parent for path in Path(folder).rglob("metrics.jsonl")}
        picture_report(run, args.output)
    return 0


def picture_report(run: Path, output: Path) -> None:
    """Summary and curves in light colors, a step with a validation in dark ones."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        write_page([run], page)
        browser = Browser(Path(folder))
        try:
            browser.open(page)
            set_colors(browser, "light")
            (output / "report.png").write_bytes(picture(browser, "summary", "charts"))
            set_colors(browser, "dark")
            browser.set("gantt-step", browser.run(STEP_OF_QUICKSTART) or browser.run("byId('gantt-step').value"))
            (output / "report_step.png").write_bytes(picture(browser, "placement", "pools"))
        finally:
            browser.close()


def set_colors(browser: Browser, scheme: str) -> None:
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=900, deviceScaleFactor=1, mobile=False)


def picture(browser: Browser, first: str, last: str) -> bytes:
    """The part of the page from one element to the end of another, as PNG."""
    top = browser.run(f"byId('{first}').getBoundingClientRect().top + scrollY")
    bottom = browser.run(f"byId('{last}').getBoundingClientRect().bottom + scrollY")
    clip = {"x": 0, "y": top, "width": WIDTH, "height": bottom - top + 12, "scale": 1}
    return base64.b64decode(browser.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"])


if __name__ == "__main__":
    sys.exit(main())
