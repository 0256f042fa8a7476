"""The time that captures take, and the time that they must not take along."""

from __future__ import annotations

from time import sleep

import pytest
import torch

from harness import captures
from harness.captures import Captures
from harness.clock import Clock

PAUSE_S = 0.02


def test_what_was_launched_before_a_capture_is_no_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A capture's time is dropped: with a forward under way, so would be the forward's."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: sleep(PAUSE_S))
    monkeypatch.setattr(captures, "_captured", lambda body, _: body)
    clock = Clock()
    made = Captures(clock)
    with clock.span("verify"):
        made.graph(lambda: None, torch.device("cuda"))
    assert clock.us["verify"] >= PAUSE_S * 1e6
    assert clock.us["capture"] == pytest.approx(made.capture_s * 1e6)
