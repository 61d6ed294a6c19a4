"""Every step that a plan can contain, forward and backward, on real ranks.

What a rank must hold follows from the meaning of the types alone: the parts that the ranks
of an axis hold make up one logical value (the same on all, slices, or a sum), and so do the
gradients. So every case states logical values, cuts them into parts, runs the step, and
looks at what the parts that came out make up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.comparison import mesh_of_ranks
from support.devices import DEVICE
from support.prices import Prices
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import PlanError
from autoshard.layouts import (
    STEPS,
    AxisType,
    Kind,
    Layout,
    ReshardingTable,
    Step,
    largest_shard,
    parse_type,
)
from autoshard.plan import PlannedStep
from autoshard.runtime.process_groups import process_group
from autoshard.runtime.recorder import CollectiveRecord, record_collectives, summarize
from autoshard.runtime.resharding import bind_steps

JOINT = "a+b"
COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
SHAPE = (4, 8, 8)


@dataclass(frozen=True)
class Setting:
    """A tensor, and the axis on which it is resharded.

    Attributes:
        shape: of the tensor.
        mesh: shape of the mesh, whose last axis is the one, or all of whose axes are one group.
        axis: the name of the axis or group.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    axis: str

    @property
    def num_ranks(self) -> int:
        """Of the axis or group."""
        return prod(self.mesh) if self.axis == JOINT else self.mesh[-1]


EVEN = Setting(SHAPE, (2, 2), "b")
EVEN_JOINT = Setting(SHAPE, (2, 2), JOINT)
EVEN_ON_4 = Setting(SHAPE, (4,), "a")
UNEVEN = Setting((10, 8, 7), (4,), "a")
"""Four ranks hold 3, 3, 3 and 1 of dim 0, two each of dim 1, and 2, 2, 2 and 1 of dim 2."""
EMPTY = Setting((5, 1, 6), (4,), "a")
"""Four ranks hold 2, 2, 1 and none of dim 0, 1 and none of dim 1, and 2, 2, 2 and none of dim 2."""
GRADIENT = {"I": "I", "R": "P", "P": "I"}
"""Type of the gradient of a value of each type, a gradient seen as a value."""


def step(source: str, target: str, *, axis: str = "b", nbytes: int = 0) -> PlannedStep:
    forward, backward = STEPS[Kind(source[0]), Kind(target[0])]
    return PlannedStep(
        axis=axis,
        source=source,
        target=target,
        forward=forward,
        backward=backward,
        nbytes=nbytes,
        time=0.0,
    )


def mesh(*shape: int) -> DeviceMesh:
    return mesh_of_ranks(shape, ("a", "b")[: len(shape)])


def gather(part: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The parts of all ranks, which may differ in size."""
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, part, group=group)
    return parts


def cut(value: torch.Tensor, kind: str, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of a logical value, on its device."""
    value = value.to(DEVICE)
    rank, size = group.rank(), group.size()
    if kind in "IR":
        return value.clone()
    if kind == "P":
        weights = torch.arange(1, size + 1, device=DEVICE)
        weights[-1] -= weights.sum() - 1
        return value * weights[rank]
    cut = parse_type(kind)
    slices = [chunks_of(chunk, size, cut.dim)[rank] for chunk in sub_shards_of(value, cut)]
    return torch.cat(slices, cut.dim)


def chunks_of(value: torch.Tensor, size: int, dim: int) -> list[torch.Tensor]:
    """As many chunks as ranks; the last ones may be empty."""
    chunks = list(value.chunk(size, dim))
    return chunks + [value.narrow(dim, 0, 0)] * (size - len(chunks))


def sub_shards_of(value: torch.Tensor, cut: AxisType) -> tuple[torch.Tensor, ...]:
    """The chunks of a dim, or of a rank's slice of it, in order."""
    unit = value.shape[cut.dim] // max(sum(cut.sub_shards), 1)
    return value.split([unit * size for size in cut.sub_shards or (1,)], cut.dim)


def merge(part: torch.Tensor, kind: str, group: dist.ProcessGroup) -> torch.Tensor:
    """The logical value that the ranks' parts make up, on the CPU."""
    parts = [other.cpu() for other in gather(part, group)]
    if kind in "IR":
        for other in parts:
            torch.testing.assert_close(other, parts[0], rtol=0, atol=0)
        return parts[0]
    if kind == "P":
        return torch.stack(parts).sum(0)
    cut = parse_type(kind)
    by_sub_shard = zip(*(sub_shards_of(part, cut) for part in parts), strict=True)
    return torch.cat([part for chunk in by_sub_shard for part in chunk], cut.dim)


def logical(seed: int, dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype in (torch.float64, torch.complex64):
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randint(-8, 8, shape, generator=generator).to(dtype)


@cache
def table(setting: Setting) -> ReshardingTable:
    sizes = (setting.num_ranks,)
    return ReshardingTable(setting.shape, 8, sizes, differentiable=True, pricer=Prices())


def of_the_planner(source: str, target: str, setting: Setting) -> Step:
    """The step as the planner has it, for elements of 8 bytes."""
    (found,) = table(setting).path(Layout.parse(source), Layout.parse(target))
    assert (str(found.source), str(found.target)) == (source, target)
    assert (found.forward, found.backward) == STEPS[Kind(source[0]), Kind(target[0])]
    return found


def filled(source: str, target: str, setting: Setting) -> int:
    """Elements of the larger tensor of a step, with slices as long as the largest."""
    sizes = list(setting.shape)
    cut = [parse_type(text).dim for text in (source, target) if text.startswith("S")]
    for dim in cut:
        sizes[dim] = setting.num_ranks * largest_shard(sizes[dim], setting.num_ranks)
    return prod(sizes) // setting.num_ranks if len(cut) > 1 else prod(sizes)


def check_step(
    source: str, target: str, dtype: torch.dtype = torch.float32, setting: Setting = EVEN
) -> None:
    """The logical value survives the step, and so does the logical gradient."""
    device_mesh = mesh(*setting.mesh)
    group = process_group(device_mesh, setting.axis)
    nbytes = dtype.itemsize * filled(source, target, setting)
    planned = step(source, target, axis=setting.axis, nbytes=nbytes)
    (run,) = bind_steps([planned], device_mesh, setting.shape)
    value, cotangent = (logical(seed, dtype, setting.shape) for seed in (1, 2))

    before = cut(value, source, group).requires_grad_()
    # Older versions of gloo exchange single tensors only.
    lists = patch.object(dist, "all_to_all", side_effect=RuntimeError("no lists of tensors"))
    with record_collectives(device_mesh) as recorder, lists:
        after = run(before)
        after.backward(cut(cotangent, GRADIENT.get(target, target), group))

    assert before.grad is not None
    assert before.grad.shape == before.shape
    torch.testing.assert_close(merge(after.detach(), target, group), value)
    gradient = merge(before.grad, GRADIENT.get(source, source), group)
    torch.testing.assert_close(gradient, cotangent)
    assert setting in (UNEVEN, EMPTY) or nbytes == max(before.nbytes, after.nbytes)
    assert recorder.records == [
        CollectiveRecord(str(action), setting.axis, nbytes, direction)
        for action, direction in ((planned.forward, "forward"), (planned.backward, "backward"))
        if action in COLLECTIVES
    ]


def check_uneven_step(source: str, target: str) -> None:
    """As the planner has it, with the bytes that it prices."""
    found = of_the_planner(source, target, UNEVEN)
    assert found.nbytes == 8 * filled(source, target, UNEVEN)
    check_step(source, target, torch.float64, UNEVEN)


def check_without_gradient(
    source: str, target: str, dtype: torch.dtype, setting: Setting = EVEN_ON_4
) -> None:
    """Masks and numbers without a gradient are filled up alike."""
    device_mesh = mesh(*setting.mesh)
    group = process_group(device_mesh, setting.axis)
    planned = step(source, target, axis=setting.axis)
    (run,) = bind_steps([planned], device_mesh, setting.shape)
    value = logical(1, dtype, setting.shape)
    after = run(cut(value, source, group).to(dtype))
    assert after.dtype == dtype
    assert not after.requires_grad
    torch.testing.assert_close(merge(after, target, group).to(dtype), value)


def check_masks_keep_the_first_rank() -> None:
    device_mesh = mesh(2, 2)
    group = device_mesh.get_group("a")
    value = logical(1, torch.float32).to(DEVICE)
    for source in "IR":
        (run,) = bind_steps([step(source, "P", axis="a")], device_mesh, SHAPE)
        expected = value if group.rank() == 0 else torch.zeros_like(value)
        torch.testing.assert_close(run(value), expected)


def check_step_on_an_axis_of_one_rank() -> None:
    device_mesh = mesh(1, 4)
    assert bind_steps([step("S(0)", "R", axis="a")], device_mesh, SHAPE) == ()
    assert len(bind_steps([step("S(0)", "R", axis="b")], device_mesh, SHAPE)) == 1


def check_expanded_gradient() -> None:
    """Autograd hands `sum()` an expanded scalar; collectives must take it."""
    device_mesh = mesh(4)
    for source, target in (("I", "R"), ("P", "R"), ("S(1)", "R"), ("S(1)", "S(0)")):
        (run,) = bind_steps([step(source, target, axis="a")], device_mesh, SHAPE)
        value = cut(logical(1, torch.float32), source, device_mesh.get_group("a"))
        value.requires_grad_()
        run(value.transpose(0, 2).transpose(0, 2)).sum().backward()
        assert value.grad is not None


def check_chain() -> None:
    """Two axes that cut one dim, gathered from the innermost: the slices come back in order."""
    device_mesh = mesh(2, 2)
    row, column = device_mesh.get_coordinate() or (0, 0)
    value = logical(1, torch.float32).to(DEVICE)
    steps = [step("S(0)", "R", axis=name) for name in ("a", "b")]
    mine = value[2 * column + row : 2 * column + row + 1]
    for run in bind_steps(steps, device_mesh, SHAPE):
        mine = run(mine)
    torch.testing.assert_close(mine, value)


def check_axes_as_one_group() -> None:
    """One collective over two axes does what one over each of them does."""
    device_mesh = mesh(2, 2)
    value = logical(1, torch.float64, (8, 8))
    for source, target in JOINT_PAIRS:
        shape = value.shape
        mine = local_part(value, source, device_mesh)
        (joint,) = bind_steps([step(source, target, axis=JOINT)], device_mesh, shape)
        names = ("b", "a") if source.startswith("S") else ("a", "b")
        single = bind_steps([step(source, target, axis=a) for a in names], device_mesh, shape)
        expected = mine
        for run in single:
            expected = run(expected)
        torch.testing.assert_close(joint(mine), expected)


def local_part(value: torch.Tensor, kind: str, device_mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of a value of one type on both axes, outermost first."""
    for axis in ("a", "b"):
        value = cut(value, kind, device_mesh.get_group(axis))
    return value


def check_group_of_ranks_in_another_order() -> None:
    permuted = DeviceMesh(DEVICE, torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("a", "b"))
    with pytest.raises(PlanError, match=r"must ascend, but those of the mesh are \[0, 2, 1, 3\]"):
        bind_steps([step("S(0)", "R", axis=JOINT)], permuted, SHAPE)


def check_groups_are_made_once() -> None:
    device_mesh = mesh(2, 2)
    assert process_group(device_mesh, JOINT) is process_group(device_mesh, JOINT)
    assert process_group(device_mesh, JOINT).size() == 4


def check_foreign_collectives_are_seen() -> None:
    """Whatever communicates is recorded, also what no plan contains and no axis carries."""
    device_mesh = mesh(2, 2)
    tensor = torch.ones(3)
    with record_collectives(device_mesh) as recorder:
        dist.broadcast(tensor, 0)
        dist.all_reduce(tensor, group=device_mesh.get_group("b"))
        dist.barrier()
    assert recorder.records == [
        CollectiveRecord("broadcast", "?", 12, "forward"),
        CollectiveRecord("all_reduce", "b", 12, "forward"),
    ]
    with record_collectives(device_mesh) as again:
        pass
    assert summarize(again.records) == ()


def check_unknown_axis() -> None:
    with pytest.raises(PlanError, match="axis 'c'"):
        bind_steps([step("S(0)", "R", axis="c")], mesh(2, 2), SHAPE)


PAIRS = [
    (source, target)
    for source in ("I", "R", "P", "S(0)", "S(1)", "S(2)")
    for target in ("I", "R", "P", "S(0)", "S(1)", "S(2)")
    if source != target and (Kind(source[0]), Kind(target[0])) in STEPS
]
JOINT_PAIRS = [
    (source, target)
    for source, target in PAIRS
    if any(action in COLLECTIVES for action in STEPS[Kind(source[0]), Kind(target[0])])
    and "S(2)" not in (source, target)
    and not (source.startswith("S") and target.startswith("S"))
]
"""Steps that both axes can take one after the other; all-to-alls of one axis move other slices."""
INTERLEAVED = [
    pair
    for cut in ("S(0)/1+1", "S(1)/1+1", "S(1)/1+1+2", "S(2)/3+1")
    for other in ("I", "R", "P", "S(0)", "S(2)", "S(2)/1+1+2")
    for pair in ((cut, other), (other, cut))
    if cut[:4] != other[:4] and (Kind(pair[0][0]), Kind(pair[1][0])) in STEPS
]
UNDIFFERENTIATED = [
    *(("I", "R"), ("P", "R"), ("R", "P"), ("S(1)", "R")),
    *(("P", "S(2)"), ("R", "S(1)"), ("S(0)", "S(1)")),
]
CUTTING = [pair for pair in PAIRS if "S" in "".join(pair)]
FREE_DTYPES = {"bool": torch.bool, "int64": torch.int64, "bfloat16": torch.bfloat16}
CASES: dict[str, Callable[[], None]] = {
    **{f"{s}->{t}": partial(check_step, s, t) for s, t in (*PAIRS, *INTERLEAVED)},
    **{f"{s}->{t} in bfloat16": partial(check_step, s, t, torch.bfloat16) for s, t in PAIRS},
    **{
        f"{s}->{t} of {name} without gradient": partial(check_without_gradient, s, t, dtype)
        for s, t in UNDIFFERENTIATED
        for name, dtype in FREE_DTYPES.items()
        if name != "bool" or "P" not in (s, t)
    },
    **{
        f"{s}->{t} of complex numbers": partial(check_step, s, t, torch.complex64, UNEVEN)
        for s, t in CUTTING
    },
    **{f"{s}->{t}, uneven": partial(check_uneven_step, s, t) for s, t in CUTTING},
    **{
        f"{s}->{t}, a rank without elements": partial(check_step, s, t, torch.float64, EMPTY)
        for s, t in CUTTING
    },
    **{
        f"{s}->{t} of bool without gradient, uneven": partial(
            check_without_gradient, s, t, torch.bool, UNEVEN
        )
        for s, t in CUTTING
        if s != "P"
    },
    **{
        f"{s}->{t}, over two axes": partial(check_step, s, t, setting=EVEN_JOINT)
        for s, t in (*PAIRS, ("S(1)/1+1", "R"), ("P", "S(1)/1+1"), ("S(0)", "S(1)/1+1"))
        if any(action in COLLECTIVES for action in STEPS[Kind(s[0]), Kind(t[0])])
    },
    "axes as one group": check_axes_as_one_group,
    "a group of ranks in another order": check_group_of_ranks_in_another_order,
    "groups are made once": check_groups_are_made_once,
    "masks keep the first rank": check_masks_keep_the_first_rank,
    "an axis of one rank": check_step_on_an_axis_of_one_rank,
    "expanded gradient": check_expanded_gradient,
    "chain": check_chain,
    "foreign collectives": check_foreign_collectives_are_seen,
    "unknown axis": check_unknown_axis,
}
LONG = tuple(f"{s}->{t} in bfloat16" for s, t in CUTTING if ("S(1)" in (s, t)) != ("P" in (s, t)))
"""Each kind of step is in bfloat16 in one of the others."""
