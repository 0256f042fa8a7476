"""Without a GPU, Triton kernels are tested in Triton's own interpreter; and no file of tests leaves
torch with fewer threads than it found, for those behind it decode with the real pair."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


# A shell has what it starts in the background ignore Ctrl-C, and so would all that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
