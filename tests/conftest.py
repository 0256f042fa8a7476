"""Without a GPU, Triton kernels are tested in Triton's own interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
