"""Files are whole, also where the disk refuses."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from paceline.errors import StorageError
from paceline.files import readable_storage_errors, replacing, replacing_folder, storage_error, write_atomically
from paceline.report.timeline import TimelineWriter, read_events
from paceline.report.trackers import JsonlTracker, read_metrics
from tests.full_disk import largest_file


def test_a_line_of_metrics_is_in_the_file_whole_or_not_at_all(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl", None)
    tracker.log({"a": 1}, step=1)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with largest_file(size + 5), pytest.raises(OSError, match="large"):
        tracker.log({"a": 2}, step=2)
    assert (tmp_path / "metrics.jsonl").stat().st_size == size
    tracker.log({"a": 2}, step=2)
    tracker.close()
    assert [line["a"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_timeline_stays_complete_json_and_writes_later_what_it_could_not(tmp_path: Path) -> None:
    timeline = TimelineWriter(tmp_path / "timeline.json")
    timeline.add_span("driver", "first", 1.0, 2.0)
    timeline.flush()
    size = (tmp_path / "timeline.json").stat().st_size
    timeline.add_span("driver", "second", 2.0, 3.0)
    with largest_file(size + 5), pytest.raises(OSError, match="large"):
        timeline.flush()
    assert [event["name"] for event in read_events(tmp_path / "timeline.json")] == ["first"]
    timeline.close()
    assert [event["name"] for event in read_events(tmp_path / "timeline.json")] == ["first", "second"]


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "Its disk is full"), (errno.EROFS, "read-only for this user"), (errno.EIO, "MiB free")],
)
def test_what_the_disk_refuses_is_told_with_what_to_do(tmp_path: Path, number: int, advice: str) -> None:
    with pytest.raises(StorageError, match=rf"{tmp_path}/x can't be written.*{advice}.*start again"):
        raise_in_block(tmp_path, OSError(number, "the system's words", str(tmp_path / "x")))


def test_other_errors_of_the_system_are_left_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(ConnectionRefusedError):
        raise_in_block(tmp_path, ConnectionRefusedError(errno.ECONNREFUSED, "a service"))


def raise_in_block(folder: Path, error: OSError) -> None:
    with readable_storage_errors(folder):
        raise error


def test_an_error_without_a_number_names_the_folder(tmp_path: Path) -> None:
    message = str(storage_error(tmp_path / "not" / "made", RuntimeError("file write failed")))
    assert message.startswith(f"{tmp_path}/not/made can't be written: file write failed. Its disk has ")
    lost = RuntimeError("Error while serializing: I/O error: No such file or directory (os error 2)")
    assert "The folder was removed while the run wrote to it" in str(storage_error(tmp_path / "gone", lost))


@pytest.mark.parametrize("many_writers", [False, True])
def test_a_file_that_can_not_be_finished_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, many_writers: bool
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with largest_file(4), pytest.raises(OSError, match="large"), replacing(path, many_writers=many_writers) as new:
        new.write_bytes(b"too much")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_at_the_same_time_do_not_touch_each_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path, many_writers=True) as one, replacing(path, many_writers=True) as other:
        one.write_bytes(b"one")
        other.write_bytes(b"other")
    assert path.read_bytes() == b"one"  # whose block ended last
    assert list(tmp_path.iterdir()) == [path]


def test_a_single_writer_that_was_killed_leaves_nothing_for_ever(tmp_path: Path) -> None:
    with replacing(tmp_path / "file") as temporary:
        temporary.write_bytes(b"1")
    temporary.write_bytes(b"half")
    write_atomically(tmp_path / "file", b"2", durable=False)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_folder_takes_the_place_of_the_old_one_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with replacing_folder(path) as temporary:
        (temporary / "a").touch()
    with pytest.raises(OSError, match="full"), replacing_folder(path) as temporary:
        raise OSError("full")
    assert [child.name for child in path.iterdir()] == ["a"]
    with replacing_folder(path) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "b").touch()
    assert sorted(child.name for child in path.rglob("*")) == ["b", "sub"]
    assert list(tmp_path.iterdir()) == [path]
