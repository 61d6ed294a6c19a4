"""The devices of ranks in tests: CPUs with gloo, or GPUs with NCCL.

`AUTOSHARD_TEST_DEVICE=cuda` runs the cases on GPUs. Models are built and compared on the CPU, so
that cases are the same on both. Ranks may share a GPU if NCCL allows it
(`NCCL_MULTI_RANK_GPU_ENABLE=1` since NCCL 2.31), or if each of them is on a host of its own
(`AUTOSHARD_RANKS_AS_HOSTS=1`).
"""

import os

import torch

from autoshard.launching import own_gpu

DEVICE = os.environ.get("AUTOSHARD_TEST_DEVICE", "cpu")
"""Type of the devices of ranks: "cpu" or "cuda"."""

BACKEND = "gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl"


def use_device(rank: int) -> None:
    """Let this process run on its GPU, with products as exact as those of CPUs."""
    if DEVICE == "cpu":
        return
    os.environ["LOCAL_RANK"] = str(rank)  # as launchers do
    if "AUTOSHARD_RANKS_AS_HOSTS" in os.environ:
        os.environ["NCCL_HOSTID"] = str(rank)
    own_gpu()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
