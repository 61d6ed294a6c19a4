"""The context of a launched process: its plan, device mesh, device and step timer."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.errors import PlanError
from autoshard.mesh import mesh_text
from autoshard.plan import Plan

PLAN_VARIABLE = "AUTOSHARD_PLAN"
"""Environment variable with the path of the plan."""

TIMING_VARIABLE = "AUTOSHARD_TIMING"
"""Environment variable; if it is 1, steps are measured and printed."""

_MILLISECONDS = 1e3


class StepTimer:
    """Measures steps and compares them with the plan's prediction.

    Args:
        plan: has the predicted time.
        device: synchronised before and after each step.
        report: called with a message after each step.

    Raises:
        PlanError: the document contains no plan.

    Attributes:
        predicted: seconds of a step that the plan predicts without overlap.
        seconds: measured seconds of each step so far.
    """

    def __init__(
        self, plan: Plan, device: torch.device, report: Callable[[str], None] | None = None
    ) -> None:
        if plan.costs is None:
            raise PlanError(f"the document has no plan to compare with: {plan.reason}")
        self.predicted = plan.costs.total + plan.costs.overlapped
        self.seconds: list[float] = []
        self._device = device
        self._report = report

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context that measures one step."""
        synchronize(self._device)
        start = perf_counter()
        yield
        synchronize(self._device)
        self.seconds.append(perf_counter() - start)
        if self._report is not None:
            self._report(f"step {len(self.seconds)}: {self._compared(self.seconds[-1])}")

    def summary(self) -> str:
        """A message with the median step; the first one is a warm-up and does not count."""
        counted = self.seconds[1:] or self.seconds
        if not counted:
            return "no steps were measured"
        return f"median of {len(counted)} steps: {self._compared(median(counted))}"

    def _compared(self, seconds: float) -> str:
        return (
            f"{seconds * _MILLISECONDS:.3f} ms, predicted {self.predicted * _MILLISECONDS:.3f} ms "
            f"({seconds / self.predicted:.2f} times as long)"
        )


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on an accelerator."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class LaunchContext:
    """The context of a process that was launched for a plan.

    Attributes:
        plan: the plan.
        device_mesh: the process groups, with the axes of the plan.
        device: the device of this rank.
        timer: measures steps; None without `--timing`.
    """

    plan: Plan
    device_mesh: DeviceMesh
    device: torch.device
    timer: StepTimer | None = None

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.device_mesh.get_rank()

    def step(self) -> AbstractContextManager[None]:
        """A context for one training step.

        With timing, rank 0 prints its duration and the predicted one.
        """
        return nullcontext() if self.timer is None else self.timer.step()

    def close(self) -> None:
        """Print the median step if timing is on, and destroy the process groups."""
        if self.timer is not None and self.rank == 0:
            _print(self.timer.summary())
        if dist.is_initialized():
            dist.destroy_process_group()


@cache
def get_context() -> LaunchContext:
    """The context of a process started by `autoshard launch`.

    Other launchers work too if they set the environment variables of `torchrun`, and AUTOSHARD_PLAN
    to the path of the plan. The mesh has the axes of the plan. It uses GPUs if there are any and
    the plan's topology has the backend `nccl`, and CPUs otherwise.

    Raises:
        PlanError: the process was launched without a plan, the number of ranks is not that of the
            plan's mesh, or other ranks have another plan.
    """
    path = os.environ.get(PLAN_VARIABLE)
    if path is None or "WORLD_SIZE" not in os.environ:
        raise PlanError(
            f"this process was not launched with a plan: start it with `autoshard launch --plan "
            f"plan.json {Path(sys.argv[0]).name}`, or with torchrun and the path of the plan in "
            f"the variable {PLAN_VARIABLE}"
        )
    plan = Plan.from_json(Path(path).read_bytes())
    return join(plan, timing=os.environ.get(TIMING_VARIABLE) == "1")


def join(plan: Plan, *, timing: bool = False) -> LaunchContext:
    """Create the process groups of a plan from torchrun's environment variables.

    Raises:
        PlanError: the document contains no plan, or the ranks do not fit it.
    """
    check_world(plan, int(os.environ["WORLD_SIZE"]))
    device = _device(plan)
    mesh = init_device_mesh(device.type, plan.mesh.axis_sizes, mesh_dim_names=plan.mesh.axis_names)
    _check_same_plan(plan, device)
    report = _print if mesh.get_rank() == 0 else None
    timer = StepTimer(plan, device, report) if timing else None
    return LaunchContext(plan, mesh, device, timer)


def check_world(plan: Plan, num_ranks: int) -> None:
    """Check that the number of ranks is that of the plan's devices.

    Raises:
        PlanError: it is not, or the document contains no plan.
    """
    if not plan.found:
        raise PlanError(f"the document has no plan to launch: {plan.reason}")
    if num_ranks != plan.mesh.num_devices:
        raise PlanError(
            f"the plan is for {plan.mesh.num_devices} devices ({mesh_text(plan.mesh)}), but "
            f"{num_ranks} processes are launched: launch one for each device, or make a plan for "
            f"another mesh"
        )


def _device(plan: Plan) -> torch.device:
    if plan.mesh.topology.backend == "nccl" and torch.cuda.is_available():
        return own_gpu()
    return torch.device("cpu")


def own_gpu() -> torch.device:
    """The GPU of this rank, which becomes the current one.

    It is that of the local rank, or the only one where each process sees its own, as with SLURM's
    `--gpus-per-task`.
    """
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _check_same_plan(plan: Plan, device: torch.device) -> None:
    own = torch.frombuffer(bytearray.fromhex(plan.id), dtype=torch.uint8).to(device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    others = [rank for rank, other in enumerate(every) if not torch.equal(other, own)]
    if others:
        raise PlanError(
            f"rank {dist.get_rank()} has plan {plan.id[:12]}, but ranks {others} have another one: "
            f"launch all ranks with the same file"
        )


def _print(text: str) -> None:
    print(f"autoshard: {text}", flush=True)  # noqa: T201  for the user of the program
