"""Strategies for the tests of what happens when a job's process is killed."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from strategies.base import Setup
from strategies.plain import Plain


class Deadly(Plain):
    """Kills its process when it is made."""

    name = "deadly"

    def __init__(self, options: Any, setup: Setup) -> None:
        super().__init__(options, setup)
        os.kill(os.getpid(), signal.SIGKILL)


class Patient(Plain):
    """Begins late enough to be running when the other one dies."""

    name = "patient"

    def __init__(self, options: Any, setup: Setup) -> None:
        super().__init__(options, setup)
        time.sleep(2)
