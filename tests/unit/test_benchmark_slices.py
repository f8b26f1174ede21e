import itertools
import sys
import time

import psutil
import pytest

from benchmarks import slices
from benchmarks.slices import SlicedProcess, take_slices

COUNT = """
import os, subprocess, sys, time
if len(sys.argv) == 2:
    sys.exit(subprocess.run([sys.executable, __file__, sys.argv[1], str(os.getpid())]).returncode)
while os.getppid() == int(sys.argv[2]):
    with open(sys.argv[1], "a") as file:
        file.write(f"{time.time()}\\n")
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(slices, "POLL_SECONDS", 0.05)


@pytest.fixture
def counting(tmp_path):
    """Starts processes whose child notes the time over and over."""
    script = tmp_path / "count.py"
    script.write_text(COUNT)
    started = []

    def start(name):
        process = SlicedProcess([sys.executable, str(script), str(tmp_path / name)], {}, tmp_path / f"{name}.log")
        started.append(process)
        return process, tmp_path / name

    yield start
    for process in started:
        process.end()


def times(file):
    return [float(line) for line in file.read_text().splitlines()]


def note_slices(process):
    """The moments just before it is let go on and just after it is stopped, and just after and just before."""
    outer, inner = [], []
    go_on, stop = process.go_on, process.stop

    def noted_go_on():
        before = time.time()
        go_on()
        outer.append([before])
        inner.append([time.time()])

    def noted_stop():
        inner[-1].append(time.time())
        stop()
        outer[-1].append(time.time())

    process.go_on, process.stop = noted_go_on, noted_stop
    return outer, inner


def test_one_goes_on_while_the_children_of_the_others_are_stopped_too(counting, monkeypatch):
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.3)
    (first, first_file), (second, second_file) = counting("first"), counting("second")
    for process, file in ((first, first_file), (second, second_file)):
        process.run_until(lambda file=file: file.exists() and len(times(file)) > 3)
    before = {file: len(times(file)) for file in (first_file, second_file)}
    noted = {first: note_slices(first), second: note_slices(second)}
    rounds = itertools.count()
    begin = time.time()

    def done():
        """After three rounds; a busy machine may take more until each had a turn."""
        number = next(rounds)
        return number >= 3 and (number >= 30 or all(len(times(file)) > count for file, count in before.items()))

    take_slices([first, second], until=done)
    end = time.time()
    turns = sorted((*turn, process is second) for process, (outer, _) in noted.items() for turn in outer)
    assert [is_second for _, _, is_second in turns] == [False, True] * (len(turns) // 2)
    assert len(turns) >= 6
    assert all(turn[1] <= following[0] for turn, following in itertools.pairwise(turns))
    for process, file in ((first, first_file), (second, second_file)):
        outer, inner = noted[process]
        moments = times(file)[before[file] :]
        assert moments
        # The first may have been noted before the process was stopped, and written now.
        for moment in moments[1:]:
            assert any(since <= moment <= until + 0.05 for since, until in outer)
        least, most = (sum(until - since for since, until in turns) for turns in (inner, outer))
        assert least - 0.001 <= process.own_seconds(begin, end) <= most + 0.001
        assert process.own_seconds(end, end + 5) == pytest.approx(0, abs=0.001)
        assert 2**20 < process.largest_resident() < 2**30, "a Python and little more"


def test_a_process_that_ends_by_itself_is_told_of_with_its_last_words(tmp_path):
    process = SlicedProcess([sys.executable, "-c", "raise SystemExit('no such model')"], {}, tmp_path / "log")
    with pytest.raises(RuntimeError, match="ended too early:\nno such model"):
        process.run_until(lambda: False)
    process.end()


def test_a_process_that_is_never_ready_is_told_of_with_its_last_words(counting, monkeypatch, tmp_path):
    monkeypatch.setattr(slices, "READY_SECONDS", 0.1)
    process, _ = counting("first")
    (tmp_path / "first.log").write_text("waiting for a GPU")
    rounds = iter([False] * 4)
    with pytest.raises(RuntimeError, match=r"not ready after 0\.1 seconds:\nwaiting for a GPU"):
        process.run_until(lambda: next(rounds))


def test_a_stranger_that_has_the_number_of_a_process_that_ended_is_left_alone(counting):
    process, _ = counting("first")
    stranger = psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        process.look()
        former = psutil.Process(stranger.pid)
        former._ident = (stranger.pid, former._ident[1] - 1)  # begun earlier
        process._tree.insert(0, former)
        process.stop()
        deadline = time.monotonic() + 10
        while process._process.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process._process.status() == psutil.STATUS_STOPPED
        assert stranger.status() != psutil.STATUS_STOPPED
        process._tree.remove(former)
    finally:
        stranger.kill()
        stranger.wait()
