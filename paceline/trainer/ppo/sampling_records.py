"""When a rollout sampled that decodes beside its calls: spans for the timeline in place of the calls that collect."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from paceline.single_controller.base import CallRecord
from paceline.workers.request_calls import SAMPLED

METHOD = "sample"
"""What these spans are called."""
GAP_SECONDS = 0.1
"""Calls interrupt the decoding for a moment, many times a second; what lies closer together is one span."""


def with_sampling(records: Iterable[CallRecord]) -> list[CallRecord]:
    """The records, with a span for each time that a process sampled, with weights of one version."""
    found: list[CallRecord] = []
    newest: dict[tuple[str, int], int] = {}
    """By pool and rank, which of `found` its last span is."""
    for record in records:
        if SAMPLED not in record.tag:
            found.append(record)
            continue
        tag = {name: value for name, value in record.tag.items() if name != SAMPLED}
        for start, end, version in record.tag[SAMPLED]:
            process = (record.pool, record.rank)
            span = replace(record, method=METHOD, start=start, end=end, tag={**tag, "version": version})
            last = found[newest[process]] if process in newest else None
            if last is not None and last.tag == span.tag and start - last.end < GAP_SECONDS:
                found[newest[process]] = replace(last, end=end)
            else:
                newest[process] = len(found)
                found.append(span)
    return found
