"""The documentation as a site, built as `make docs` does, and looked at in a browser where there is one."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from tests.browser import CHROMIUM, Browser

ROOT = Path(__file__).parents[2]


def test_the_site_builds_without_a_warning(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site" / "troubleshooting.html").exists()
    page = (tmp_path / "site" / "algorithms.html").read_text()
    links = re.findall(r'href="(?!https?:|#)([^"#]+)', page)
    folders = [link for link in links if not (tmp_path / "site" / link).is_file()]
    assert folders == [], "from the disk, a link to a folder opens a list of files"
    if CHROMIUM is not None:
        _check_that_tables_fit(tmp_path / "site", tmp_path / "browser")


def _check_that_tables_fit(site: Path, profile: Path) -> None:
    tables = "[...document.querySelectorAll('.wy-table-responsive')]"
    cut_off: list[str] = []
    browser = Browser(profile)
    try:
        browser.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
        for page in sorted(site.rglob("*.html")):
            browser.go(page.as_uri())
            if browser.run("document.querySelectorAll('table').length") == 0:
                continue
            while not browser.run(f"{tables}.length"):  # the theme's script puts tables into such boxes
                time.sleep(0.05)
            cut_off += [page.name] * browser.run(f"{tables}.filter(t => t.scrollWidth > t.clientWidth + 1).length")
        assert cut_off == []
    finally:
        browser.close()
