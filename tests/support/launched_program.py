"""A program for launched ranks; run by itself, or `train` called on every rank.

As a program it fails on rank 1 if its argument is `fail`: in backward, while collectives are
under way. If it is `kill`, the last rank is killed after a step, and the others go on; so they do
in a pipeline if it is `kill a stage`.
"""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.models import mlp, residuals
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard import LaunchContext, get_context, parallelize

STEPS = 3


def train(run: LaunchContext, rate: float) -> tuple[int, tuple[str, ...], float, float]:
    """Rank, axis names, and how far loss and a gradient are from those of the whole model."""
    torch.set_num_threads(1)
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


class Failing(TorchDispatchMode):
    """Fails on rank 1 in the backward of a ReLU, and says how many collectives are under way."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.threshold_backward.default and dist.get_rank() == 1:
            print(f"failed at {time.time()}", flush=True)  # noqa: T201
            raise ValueError(f"a list[int] went wrong with {self._under_way} under way")
        self._calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def _under_way(self) -> int:
        """Functional collectives that have begun and nobody has waited for."""
        found = {n: c for n, c in self._calls.items() if n.startswith("_c10d_functional::")}
        return sum(found.values()) - 2 * found.get("_c10d_functional::wait_tensor", 0)


def train_until_killed(run: LaunchContext) -> None:
    """A step on all ranks, then steps on all but the last one, which is killed."""
    _, _, loss, gradient = train(run, 0.1)
    assert abs(loss) + abs(gradient) < 1e-5
    lose_last_rank(run, lambda: train(run, 0.1))


def train_stages_until_killed(run: LaunchContext) -> None:
    """Steps of a pipeline, until the last rank is killed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = residuals()
    planned: Any = parallelize(model, run.plan, run.device_mesh)
    whole = {name: torch.cat([x] * 4) for name, x in batch.items()}
    planned.step(**whole)
    lose_last_rank(run, lambda: [planned.step(**whole) for _ in range(100)])


def lose_last_rank(run: LaunchContext, go_on: Callable[[], object]) -> None:
    """Kill the last rank; the others go on, and say how they end."""
    print(f"rank {run.rank} has trained", flush=True)  # noqa: T201
    if run.rank == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # The launcher would end this process; what counts is that the program ends by itself.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        go_on()
    except RuntimeError as error:
        print(f"rank {run.rank} ends: {str(error).splitlines()[0]}", flush=True)  # noqa: T201
        raise


def main() -> None:
    run = get_context()
    assert get_context() is run
    for _ in range(STEPS):
        with run.step():
            dist.barrier()
    if sys.argv[1:] == ["kill"]:
        train_until_killed(run)
    if sys.argv[1:] == ["kill a stage"]:
        train_stages_until_killed(run)
    if sys.argv[1:] == ["fail"]:
        torch.manual_seed(0)
        model, batch = mlp()
        parallelize(model, run.plan, run.device_mesh)
        with Failing():
            (model(**batch) ** 2).mean().backward()
    dist.barrier()
    print(f"rank {run.rank} is done with {sys.argv[1:]}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
