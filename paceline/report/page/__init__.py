"""One self-contained HTML page of a run, or of several to compare them.

    write_page([Path("runs/a"), Path("runs/b")], Path("compare.html"))

`read` takes what it needs from the files of a run's folder, also of one that is going on or was killed; the page is a
template with style, script and these data in it. It asks the network for nothing.
"""

from __future__ import annotations

from paceline.report.page.build import PAGE_FILE, write_page

__all__ = ["PAGE_FILE", "write_page"]
