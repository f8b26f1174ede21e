"""A dataset's files from the Hugging Face hub, where there is a network."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from paceline.data.sources.source_files import SUFFIXES
from paceline.errors import DataError

__all__ = ["download"]

logger = logging.getLogger(__name__)


def download(repo_id: str, patterns: Sequence[str] = (), revision: str | None = None) -> Path:
    """The folder with the dataset's data files, as they are on the hub; files that were downloaded before are kept.

    Args:
        repo_id: `owner/name` of the dataset.
        patterns: which files, such as `data/*`; none means all jsonl, jsonl.gz and parquet files.
        revision: branch, tag or commit.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    logger.info("downloading %s from the Hugging Face hub", repo_id)
    try:
        folder = snapshot_download(
            repo_id,
            repo_type="dataset",
            revision=revision,
            allow_patterns=list(patterns) or [f"*{suffix}" for suffix in SUFFIXES],
        )
    except GatedRepoError as error:
        raise DataError(
            f"The dataset {repo_id} is gated: accept its terms on the hub and log in (hf auth login). {error}"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise DataError(f"The Hugging Face hub has no public dataset {repo_id!r}: {error}") from error
    except RevisionNotFoundError as error:
        raise DataError(f"The dataset {repo_id} has no revision {revision!r}: {error}") from error
    except OSError as error:  # of these are all errors of HTTP and of a missing network
        raise DataError(
            f"The dataset {repo_id} can't be downloaded from the Hugging Face hub, and it was not downloaded before: "
            f"{type(error).__name__}: {error} Download its files where there is a network, and give their folder with "
            "--input."
        ) from error
    return Path(folder)
