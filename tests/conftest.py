"""Without a GPU, Triton kernels are tested in Triton's own interpreter; and no file of tests leaves
torch with fewer threads than it found, for those behind it decode with the real pair."""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module", autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
