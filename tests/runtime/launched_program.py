"""A program for launched ranks; run by itself, or `train` called on every rank.

As a program it fails on rank 1 if its argument is `fail`.
"""

import sys
import warnings

import torch
import torch.distributed as dist
from support.models import mlp

from autoshard import Launched, launched, parallelize

STEPS = 3


def train(run: Launched, rate: float) -> tuple[int, tuple[str, ...], float, float]:
    """Rank, axis names, and how far loss and a gradient are from those of the whole model."""
    torch.set_num_threads(1)
    # spmd_types calls collectives of torch by names that newer releases deprecate.
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.manual_seed(0)
    model, batch = mlp()
    torch.manual_seed(0)
    expected = mlp()[0]
    parallelize(model, run.plan, run.device_mesh)
    for _ in range(STEPS):
        losses = []
        for trained in (model, expected):
            optimizer = torch.optim.SGD(trained.parameters(), lr=rate)
            with run.step():
                loss = (trained(**batch) ** 2).mean()
                loss.backward()
            optimizer.step()
            losses.append(float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss))
    gradient = model.down.weight.grad.full_tensor() - expected.down.weight.grad
    names = run.device_mesh.mesh_dim_names
    return run.rank, names, losses[0] - losses[1], float(gradient.abs().max())


def main() -> None:
    run = launched()
    assert launched() is run
    for _ in range(STEPS):
        with run.step():
            dist.barrier()
    if sys.argv[1:] == ["fail"] and run.rank == 1:
        raise ValueError("a list[int] went wrong")
    dist.barrier()
    print(f"rank {run.rank} is done with {sys.argv[1:]}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
