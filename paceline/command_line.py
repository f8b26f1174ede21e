"""What every command line does with errors: a message instead of a traceback, and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from paceline.errors import ConfigError, PacelineError, Terminated


@contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """For a command line: our errors as their message alone; exit code 2 for a bad configuration, 1 for the rest."""
    try:
        yield
    except PacelineError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt as interrupt:
        terminated = isinstance(interrupt, Terminated)
        sys.stderr.write(f"stopped by {'SIGTERM' if terminated else 'Ctrl-C'}\n")
        sys.exit(143 if terminated else 130)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """A scheduler's SIGTERM ends a run as Ctrl-C does. Only a main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    was_sigterm = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal was_sigterm
        was_sigterm = True
        raise KeyboardInterrupt  # the only kind that comes out of a waiting ray.get as it is

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if was_sigterm:
            raise Terminated from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def hydra_errors_as_ours(task: Callable[..., object] | None) -> Iterator[None]:
    """What Hydra says of a yaml or an override as a ConfigError; by itself it shows a traceback for a broken yaml.

    What comes out of `task`, the function that Hydra calls, is left as it is.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        cause = f" {error.__cause__}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
        raise ConfigError(f"{error}{cause}") from error
    except OSError as error:  # of a folder that Hydra should make
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        if task is None or any(frame.f_code is task.__code__ for frame in frames):
            raise
        raise ConfigError(f"hydra.run.dir can't be made: {error}. Leave it out, or set another folder.") from error
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


def shown_without_our_frames(error: ConfigError) -> None:
    """If nobody catches it, Python shows `error` with the lines of the user's own program and its message, no more."""
    if sys.excepthook is not sys.__excepthook__:  # a debugger or a notebook shows errors in its own way
        return

    def show(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            sys.__excepthook__(kind, raised, trace)
            return
        package = os.path.dirname(__file__)
        frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(package)]
        sys.stderr.write("".join(["Traceback (most recent call last):\n", *traceback.format_list(frames)]))
        sys.stderr.write(f"{kind.__name__}: {raised}\n")

    sys.excepthook = show
