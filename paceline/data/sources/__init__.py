"""Public datasets, from their original files to the parquet files that training reads.

Takes jsonl, jsonl.gz or parquet files on disk, or a dataset of the Hugging Face hub; gives one parquet file per split
and the counts of rows read, kept and dropped.

>>> prepare(get_source("gsm8k"), find_files("~/gsm8k"), "~/data/gsm8k")  # doctest: +SKIP
{'train': SplitReport(read=7473, kept=7473, ...), 'test': SplitReport(read=1319, kept=1319, ...)}
"""

from __future__ import annotations

import dataclasses

from paceline.data.sources import full_hh_rlhf, gsm8k, hellaswag, math
from paceline.data.sources.base import MalformedRow, Source, UnusableRow
from paceline.data.sources.prepare import SplitReport, prepare
from paceline.data.sources.source_files import InputFile, download, find_files
from paceline.errors import DataError

__all__ = [
    "SOURCES",
    "InputFile",
    "MalformedRow",
    "Source",
    "SplitReport",
    "UnusableRow",
    "download",
    "find_files",
    "get_source",
    "prepare",
]

SOURCES: dict[str, dict[str, Source]] = {
    "gsm8k": {"rl": gsm8k.SOURCE},
    "math": {"rl": math.SOURCE},
    "hellaswag": {"rl": hellaswag.SOURCE},
    "full_hh_rlhf": full_hh_rlhf.SOURCES,
}
"""By name, then by what the rows are for: `rl`, `sft` or `rm`."""


def get_source(name: str, purpose: str = "rl", data_source: str | None = None) -> Source:
    """A dataset's source, for one kind of training; `data_source` replaces the name that its rows carry."""
    if name not in SOURCES:
        raise DataError(f"There is no preparation for {name!r}; there is for {', '.join(SOURCES)}.")
    if purpose not in SOURCES[name]:
        raise DataError(f"{name} can't be prepared for {purpose!r}, only for {', '.join(SOURCES[name])}.")
    source = SOURCES[name][purpose]
    if data_source is None:
        return source
    if data_source not in source.data_sources:
        raise DataError(
            f"data_source={data_source!r} is not a name of {name}; choose {' or '.join(source.data_sources)}, "
            "for which there are rewards."
        )
    others = [other for other in source.data_sources if other != data_source]
    return dataclasses.replace(source, data_sources=(data_source, *others))
