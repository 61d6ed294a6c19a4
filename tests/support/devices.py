"""The devices of ranks in tests: CPUs with gloo, or GPUs with NCCL.

`AUTOSHARD_TEST_DEVICE=cuda` runs the cases on GPUs. Models are built and compared on the CPU, so
that cases are the same on both. Ranks may share a GPU if NCCL allows it
(`NCCL_MULTI_RANK_GPU_ENABLE=1` since NCCL 2.31).
"""

import os

import torch

DEVICE = os.environ.get("AUTOSHARD_TEST_DEVICE", "cpu")
"""Type of the devices of ranks: "cpu" or "cuda"."""

BACKEND = "gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl"


def use_device(rank: int) -> None:
    """Let this process run on its GPU, with products as exact as those of CPUs."""
    if DEVICE == "cpu":
        return
    os.environ.setdefault("LOCAL_RANK", str(rank))  # as of launchers
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def own_device() -> torch.device:
    """The device of this rank."""
    return (
        torch.device(DEVICE, torch.cuda.current_device())
        if DEVICE != "cpu"
        else torch.device("cpu")
    )
