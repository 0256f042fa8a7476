"""Errors that a user can act on. Each message is one line: what, which field, what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import TIMEOUT_MAX

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
"""What a shell reports of a command that Ctrl-C ended."""


class HarnessError(ValueError):
    """Base of every error that the command line prints as one line, with exit status 2."""


class ConfigError(HarnessError):
    """A setting is wrong, or two settings cannot be combined."""


class GrammarError(HarnessError):
    """A grammar is malformed, unsupported by its engine, or does not compile."""


class MatcherError(HarnessError):
    """A matcher was asked for something that its state does not allow (rollback too far, …)."""


class DeadEnd(MatcherError):
    """No token of the vocabulary may follow (T7): this one request cannot go on."""

    def __init__(self) -> None:
        super().__init__("dead end: the grammar allows no token of this vocabulary here")


class ShardError(HarnessError):
    """A process of a data-parallel run failed or died; what the others did is kept."""


class RanksError(HarnessError):
    """The ranks of a tensor-parallel run disagree: no request can go on. Raised on all alike."""


class LostRank(RanksError):
    """A rank is gone: another one, which does not answer, or this one, for a reason of its own."""


class RequestError(HarnessError):
    """One request cannot be served; the others go on."""


def check_timeout(field: str, seconds: float) -> None:
    """A time that can be waited for.

    Raises:
        ConfigError: it is not above 0, or more than the system's clocks can count.
    """
    if not 0 < seconds <= TIMEOUT_MAX:
        raise ConfigError(
            f"{field}: {seconds} is not above 0 and at most {TIMEOUT_MAX:g}; give seconds"
        )


@contextmanager
def writing(what: str, remedy: str) -> Iterator[None]:
    """Write files in the body.

    Args:
        what: is written: a path, perhaps behind the setting that named it.
        remedy: where it cannot be.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what} cannot be written ({error.strerror}); {remedy}") from None


def named(error: BaseException) -> str:
    """The first line of what an error says, behind the name of its class."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def exit_status(command: Callable[[], int]) -> int:
    """What a command returns; ``EXIT_BAD_INPUT``, and one line, for what the user can correct."""
    try:
        return command()
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
