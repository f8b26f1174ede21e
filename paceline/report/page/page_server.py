"""`paceline report --serve`: the page on this machine's loopback, kept up to date by the files of its runs.

Every address begins with a token that is made anew at each start, so that neither other users of the machine nor pages
of the web in the same browser can read it or press its buttons. Nothing is asked of the runs themselves.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from paceline.errors import DataError
from paceline.report.json_lines import Row
from paceline.report.page.build import LIVE_POLICY, page_data, render
from paceline.report.page.follow import Follower
from paceline.report.page.read import Limits
from paceline.run_folder import CHECKPOINT_FILE, STOP_FILE

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
SLOW_LOOK_SECONDS, LIVELY_SECONDS = 1.5, 60.0
"""Between two looks at a run in which nothing has happened for so long."""
BEAT_SECONDS = 15.0
"""After so much silence a comment is sent, by which a page that is gone is found out."""
ASKED_BY = {"stop": STOP_FILE, "checkpoint": CHECKPOINT_FILE}
"""Buttons, and the files that they make in a run's folder."""


class PageServer(ThreadingHTTPServer):
    """Serves the page of these runs until `shutdown`."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.folders = list(folders)
        self.token = secrets.token_urlsafe(24)
        self.is_closing = threading.Event()

    @property
    def address(self) -> str:
        """With its token."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def close(self) -> None:
        self.is_closing.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.0"  # a connection has one answer; events end with it

    def do_GET(self) -> None:
        path = self._path_within()
        if path == "":
            page = render({"live": True, "runs": []}, LIVE_POLICY)
            self._answer(HTTPStatus.OK, page.encode(errors="replace"), "text/html; charset=utf-8")
        elif path == "events":
            self._send_events()
        else:
            self._answer(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        """A button: /<token>/stop/0 for the first run."""
        asked, _, number = (self._path_within() or "").partition("/")
        is_run = number.isdecimal() and int(number) < len(self.server.folders)
        if asked not in ASKED_BY or not is_run:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        try:
            (self.server.folders[int(number)] / ASKED_BY[asked]).touch()
        except OSError as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, str(error).encode())
            return
        self._answer(HTTPStatus.NO_CONTENT)

    def _path_within(self) -> str | None:
        """What follows the token; None without it, or if another name led here."""
        host = self.headers.get("Host", "")
        token, slash, rest = self.path.removeprefix("/").partition("/")
        is_ours = host in (f"127.0.0.1:{self.server.server_port}", f"localhost:{self.server.server_port}")
        known = hmac.compare_digest(token.encode(), self.server.token.encode())
        return rest if is_ours and slash and known else None

    def _answer(self, status: HTTPStatus, content: bytes = b"", kind: str = "text/plain; charset=utf-8") -> None:
        self._head(status, kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _head(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")

    def _send_events(self) -> None:
        """All data of the page, then what changes, until the page goes."""
        self._head(HTTPStatus.OK, "text/event-stream")
        self.end_headers()
        try:
            while not self.server.is_closing.is_set():
                self._follow()
        except (OSError, DataError):  # the page is gone, or a run puts its old files aside: the page asks again
            return

    def _follow(self) -> None:
        """Until a run begins anew."""
        folders = self.server.folders
        limits = Limits.shared_by(len(folders))
        followers = [Follower(folder, limits) for folder in folders]
        self._send("data", {**page_data(folders), "live": True})
        last_sent = last_change = time.monotonic()
        pause = LOOK_SECONDS
        while not self.server.is_closing.wait(pause):
            for number, follower in enumerate(followers):
                for change in follower.changes():
                    if change["kind"] == "reload":
                        return
                    self._send("change", {**change, "run": number})
                    last_sent = time.monotonic()
                    last_change = last_sent if change["kind"] in ("line", "log") else last_change
            pause = LOOK_SECONDS if time.monotonic() - last_change < LIVELY_SECONDS else SLOW_LOOK_SECONDS
            if time.monotonic() - last_sent > BEAT_SECONDS:
                self.wfile.write(b": still here\n\n")
                self.wfile.flush()
                last_sent = time.monotonic()

    def _send(self, event: str, data: Row) -> None:
        text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        self.wfile.write(f"event: {event}\ndata: {text}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Requests are no news; an address has the token."""
