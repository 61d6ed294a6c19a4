"""Single steps between layouts that cut a dim which the axis does not divide."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autoshard.layouts import STEPS, Conversions, Kind, Step, parse_type
from autoshard.plan import PlannedStep
from autoshard.runtime.conversions import bind_steps
from autoshard.runtime.recorder import CollectiveRecord, record_collectives

NUM_RANKS = 4
EXACT = 1e-10
SHAPE = (10, 8, 7)
"""Four ranks hold 3, 3, 3 and 1 of dim 0, two each of dim 1, and 2, 2, 2 and 1 of dim 2."""
GRADIENT = {"I": "I", "R": "P", "P": "I"}
"""Type of the gradient of a value of each type, a gradient seen as a value."""
COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}


class _Free:
    """One step is cheaper than two."""

    def collective_time(self, _action: str, _axis: int, _nbytes: int) -> float:
        return 1.0

    def copy_time(self, _nbytes: int) -> float:
        return 0.0


def planned_step(source: str, target: str) -> Step:
    """The step as the planner has it."""
    table = Conversions(SHAPE, 8, (NUM_RANKS,), differentiable=True, pricer=_Free())
    actions = STEPS[Kind(source[0]), Kind(target[0])]
    (found,) = (
        table._step(i)
        for i in range(len(table._moves.axes))
        if (
            str(table.layouts[table._moves.sources[i]]),
            str(table.layouts[table._moves.targets[i]]),
        )
        == (source, target)
    )
    assert (found.forward, found.backward) == actions
    return found


def filled(source: str, target: str) -> int:
    """Elements of the larger tensor of a step, with slices as long as the largest."""
    sizes = list(SHAPE)
    cut = [parse_type(text).dim for text in (source, target) if text.startswith("S")]
    for dim in cut:
        sizes[dim] = NUM_RANKS * -(-SHAPE[dim] // NUM_RANKS)
    elements = sizes[0] * sizes[1] * sizes[2]
    return elements // NUM_RANKS if len(cut) > 1 else elements


def cut(value: torch.Tensor, kind: str, rank: int) -> torch.Tensor:
    """A rank's part of a logical value."""
    if kind in "IR":
        return value.clone()
    if kind == "P":
        weights = torch.arange(1, NUM_RANKS + 1)
        weights[-1] -= weights.sum() - 1
        return value * weights[rank]
    return value.chunk(NUM_RANKS, parse_type(kind).dim)[rank].clone()


def merge(part: torch.Tensor, kind: str) -> torch.Tensor:
    """The logical value that the ranks' parts make up."""
    parts: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(parts, part)
    if kind in "IR":
        for other in parts:
            torch.testing.assert_close(other, parts[0], rtol=0, atol=0)
        return parts[0]
    if kind == "P":
        return torch.stack(parts).sum(0)
    return torch.cat(parts, parse_type(kind).dim)


def check_step(source: str, target: str) -> None:
    """The logical value survives the step, and so does the logical gradient."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("a",))
    found = planned_step(source, target)
    assert found.nbytes == 8 * filled(source, target)
    (run,) = bind_steps([_as_planned(found)], mesh, SHAPE)
    value, cotangent = (torch.randn(SHAPE, dtype=torch.float64) for _ in range(2))
    before = cut(value, source, mesh.get_local_rank()).requires_grad_()
    with record_collectives(mesh) as recorder:
        after = run(before)
        after.backward(cut(cotangent, GRADIENT.get(target, target), mesh.get_local_rank()))
    assert before.grad is not None
    assert before.grad.shape == before.shape
    torch.testing.assert_close(merge(after.detach(), target), value)
    torch.testing.assert_close(merge(before.grad, GRADIENT.get(source, source)), cotangent)
    assert recorder.records == [
        CollectiveRecord(str(action), "a", found.nbytes, direction)
        for action, direction in ((found.forward, "forward"), (found.backward, "backward"))
        if action in COLLECTIVES
    ]


def check_flags(source: str, target: str) -> None:
    """Masks have no gradient, and are filled up like numbers."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("a",))
    (run,) = bind_steps([_as_planned(planned_step(source, target))], mesh, SHAPE)
    value = torch.rand(SHAPE) < 0.5
    after = run(cut(value, source, mesh.get_local_rank()))
    assert torch.equal(merge(after, target), value)


def _as_planned(step: Step) -> PlannedStep:
    return PlannedStep(
        axis="a",
        source=str(step.source),
        target=str(step.target),
        forward=step.forward,
        backward=step.backward,
        nbytes=step.nbytes,
        time=0.0,
    )
