"""Exceptions that users see. Each says what was asked, what was found and what to set; each survives pickling."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.redaction import redacted


class PacelineError(Exception):
    """Base of everything that paceline raises on purpose. Its text has no secrets."""

    def __str__(self) -> str:
        return redacted(super().__str__())


class ConfigError(PacelineError, ValueError):
    """One or more problems of a configuration, all listed at once.

    >>> print(ConfigError(["data.train_files is empty; set it to a parquet file."]))
    1 problem in the configuration:
      1. data.train_files is empty; set it to a parquet file.
    """

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        noun = "problem" if len(self.problems) == 1 else "problems"
        lines = [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        super().__init__("\n".join([f"{len(self.problems)} {noun} in the configuration:", *lines]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return (type(self), (self.problems,))


class DataError(PacelineError, ValueError):
    """A data file, row or column that can't be used."""


class UnknownDataSourceError(DataError, NotImplementedError):
    """A `data_source` for which no scorer is known."""


class RewardError(PacelineError):
    """A reward function that fails on every response: training would go on with nothing to learn from."""


class CheckpointError(PacelineError):
    """A checkpoint that is missing, incomplete, or does not fit the run."""


class ScheduleError(PacelineError):
    """A rollout that the schedule does not allow, such as one of weights that are too old: nothing was updated."""


class WeightMismatchError(PacelineError):
    """A rollout that does not have the weights of the policy: what it would sample is of another model."""


class LedgerError(PacelineError):
    """A prompt that was lost, or trained twice."""


class StorageError(PacelineError):
    """A file that could not be written: the disk is full, or the folder can't be written."""


class ResourceError(PacelineError):
    """A resource pool that the cluster can't hold."""


class SandboxUnavailableError(PacelineError, RuntimeError):
    """A machine on which programs can't be isolated. Nothing was run."""


class NonFiniteError(PacelineError, ArithmeticError):
    """A number that is NaN or infinite, such as a loss; raised before the optimizer step.

    `what` names it for metrics: loss, gradient.
    """

    def __init__(self, message: str, what: str = "number") -> None:
        self.what = what
        super().__init__(message)

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, str]]:
        return (type(self), (str(self), self.what))


@dataclass(frozen=True)
class RemoteCause:
    """An exception of another process, by names: its class need not be importable here.

    >>> RemoteCause.of(FileNotFoundError("no file"))
    RemoteCause(message='no file', types=('builtins.FileNotFoundError', 'builtins.OSError', 'builtins.Exception'))
    """

    message: str
    types: tuple[str, ...]
    """Its class and the bases of that, the nearest first."""

    @classmethod
    def of(cls, error: BaseException) -> RemoteCause:
        bases = [base for base in type(error).__mro__ if issubclass(base, Exception)]
        return cls(str(error), tuple(map(_full_name, bases)))


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class WorkerError(PacelineError):
    """A failure in a remote worker: which role, rank and method, and the original traceback.

    `remote_cause` describes the exception that a method raised; None when the process died or fell silent.
    """

    def __init__(
        self,
        role: str,
        rank: int,
        method: str,
        message: str,
        remote_traceback: str = "",
        remote_cause: RemoteCause | None = None,
    ) -> None:
        self.role = role
        self.rank = rank
        self.method = method
        self.message = message
        self.remote_traceback = remote_traceback
        self.remote_cause = remote_cause
        text = f"{role} rank {rank} failed in {method}: {message}"
        super().__init__(f"{text}\n{remote_traceback}" if remote_traceback else text)

    def caused_by(self, kind: type[BaseException]) -> bool:
        """Whether an exception of this class, or of a subclass, was raised in the worker."""
        return self.remote_cause is not None and _full_name(kind) in self.remote_cause.types

    def __reduce__(self) -> tuple[type[WorkerError], tuple[str, int, str, str, str, RemoteCause | None]]:
        values = (self.role, self.rank, self.method, self.message, self.remote_traceback, self.remote_cause)
        return (type(self), values)


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM, which is treated as Ctrl-C is."""
