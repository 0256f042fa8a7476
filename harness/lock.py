"""A lock on a file, for as long as it is open: a process that dies holds none."""

from __future__ import annotations

import fcntl
from typing import IO, Any


def lock(file: IO[Any]) -> bool:
    """Lock an open file until it is closed; False where another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
