"""What a launched process knows: its plan, the device mesh, and its place in it."""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.errors import PlanError
from autoshard.plan import Plan, mesh_text
from autoshard.runtime.launch.timing import StepTimer

PLAN_VARIABLE = "AUTOSHARD_PLAN"
"""Environment variable with the path of the plan."""

TIMING_VARIABLE = "AUTOSHARD_TIMING"
"""Environment variable; set to 1, steps are measured and shown."""


@dataclass(frozen=True)
class LaunchContext:
    """A process that was started for a plan.

    Attributes:
        plan: the plan.
        device_mesh: the process groups, with the axes of the plan.
        device: what this rank runs on.
        timer: measures steps; None where that was not asked for.
    """

    plan: Plan
    device_mesh: DeviceMesh
    device: torch.device
    timer: StepTimer | None = None

    @property
    def rank(self) -> int:
        """Number of this process among all."""
        return self.device_mesh.get_rank()

    def step(self) -> AbstractContextManager[None]:
        """A context for one training step.

        Where timing was asked for, rank 0 prints how long it took and what the plan predicts.
        Otherwise it does nothing.
        """
        return nullcontext() if self.timer is None else self.timer.step()

    def close(self) -> None:
        """Show the median step where timing was asked for, and leave the process groups."""
        if self.timer is not None and self.rank == 0:
            _say(self.timer.summary())
        if dist.is_initialized():
            dist.destroy_process_group()


@cache
def get_context() -> LaunchContext:
    """The plan and the device mesh of a process that `autoshard launch` has started.

    Any launcher will do that sets the variables of `torchrun`; it has to put the path of the
    plan into the variable AUTOSHARD_PLAN. The mesh has the axes of the plan. It lies on GPUs
    where there are some and the plan's topology is for them, and on processors otherwise.

    Raises:
        PlanError: the process was not launched with a plan, or with another number of ranks
            than the plan's mesh has, or with another plan than other ranks.
    """
    path = os.environ.get(PLAN_VARIABLE)
    if path is None or "WORLD_SIZE" not in os.environ:
        raise PlanError(
            f"this process was not started for a plan: start it with `autoshard launch --plan "
            f"plan.json {Path(sys.argv[0]).name}`, or with torchrun and the path of the plan in "
            f"the variable {PLAN_VARIABLE}"
        )
    plan = Plan.from_json(Path(path).read_bytes())
    return join(plan, timing=os.environ.get(TIMING_VARIABLE) == "1")


def join(plan: Plan, *, timing: bool = False) -> LaunchContext:
    """Make the process groups of a plan; torchrun's variables say which rank this is.

    Raises:
        PlanError: there is no plan, or the ranks do not fit it.
    """
    check_world(plan, int(os.environ["WORLD_SIZE"]))
    device = _device(plan)
    mesh = init_device_mesh(device.type, plan.mesh.axis_sizes, mesh_dim_names=plan.mesh.axis_names)
    _check_same_plan(plan, device)
    report = _say if mesh.get_rank() == 0 else None
    timer = StepTimer(plan, device, report) if timing else None
    return LaunchContext(plan, mesh, device, timer)


def check_world(plan: Plan, num_ranks: int) -> None:
    """Raise unless there is one rank for each device of a plan that was found.

    Raises:
        PlanError: there is not.
    """
    if not plan.found:
        raise PlanError(f"the document has no plan to launch: {plan.reason}")
    if num_ranks != plan.mesh.num_devices:
        raise PlanError(
            f"the plan is for {plan.mesh.num_devices} devices ({mesh_text(plan.mesh)}), but "
            f"{num_ranks} processes are launched: launch one for each device, or plan for "
            f"another mesh"
        )


def _device(plan: Plan) -> torch.device:
    if plan.mesh.topology.backend == "nccl" and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _check_same_plan(plan: Plan, device: torch.device) -> None:
    own = torch.frombuffer(bytearray.fromhex(plan.id), dtype=torch.uint8).to(device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    others = [rank for rank, other in enumerate(every) if not torch.equal(other, own)]
    if others:
        raise PlanError(
            f"rank {dist.get_rank()} has plan {plan.id[:12]}, but ranks {others} have another one: "
            f"launch all ranks with one file"
        )


def _say(text: str) -> None:
    print(f"autoshard: {text}", flush=True)  # noqa: T201  beside the program's own output
