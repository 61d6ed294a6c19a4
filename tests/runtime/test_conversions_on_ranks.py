"""Every step that a plan can contain, forward and backward, on real ranks.

What a rank must hold follows from the meaning of the types alone: the parts that the ranks
of an axis hold make up one logical value (the same on all, slices, or a sum), and so do the
gradients. So every case states logical values, cuts them into parts, runs the step, and
looks at what the parts that came out make up.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.errors import PlanError
from autoshard.layouts import STEPS, AxisType, Kind, parse_type
from autoshard.plan import PlannedStep
from autoshard.runtime.conversions import bind_steps
from autoshard.runtime.recorder import CollectiveRecord, record_collectives, summarize

NUM_RANKS = 4
SHAPE = (4, 8, 8)
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
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])


def gather(part: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts


def cut(value: torch.Tensor, kind: str, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of a logical value."""
    rank, size = group.rank(), group.size()
    if kind in "IR":
        return value.clone()
    if kind == "P":
        weights = torch.arange(1, size + 1)
        weights[-1] -= weights.sum() - 1
        return value * weights[rank]
    cut = parse_type(kind)
    slices = [chunk.chunk(size, cut.dim)[rank] for chunk in chunks_of(value, cut)]
    return torch.cat(slices, cut.dim)


def chunks_of(value: torch.Tensor, cut: AxisType) -> tuple[torch.Tensor, ...]:
    """The chunks of a dim, or of a rank's slice of it, in order."""
    unit = value.shape[cut.dim] // max(sum(cut.chunks), 1)
    return value.split([unit * size for size in cut.chunks or (1,)], cut.dim)


def merge(part: torch.Tensor, kind: str, group: dist.ProcessGroup) -> torch.Tensor:
    """The logical value that the ranks' parts make up."""
    parts = gather(part, group)
    if kind in "IR":
        for other in parts:
            torch.testing.assert_close(other, parts[0], rtol=0, atol=0)
        return parts[0]
    if kind == "P":
        return torch.stack(parts).sum(0)
    cut = parse_type(kind)
    by_chunk = zip(*(chunks_of(part, cut) for part in parts), strict=True)
    return torch.cat([part for chunk in by_chunk for part in chunk], cut.dim)


def logical(seed: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randint(-8, 8, SHAPE, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


def check_step(source: str, target: str, dtype: torch.dtype = torch.float32) -> None:
    """The logical value survives the step, and so does the logical gradient."""
    device_mesh = mesh(2, 2)
    group = device_mesh.get_group("b")
    planned = step(source, target)
    (run,) = bind_steps([planned], device_mesh, SHAPE)
    value, cotangent = logical(1, dtype), logical(2, dtype)

    before = cut(value, source, group).requires_grad_()
    with record_collectives(device_mesh) as recorder:
        after = run(before)
        after.backward(cut(cotangent, GRADIENT.get(target, target), group))

    assert before.grad is not None
    torch.testing.assert_close(merge(after.detach(), target, group), value)
    gradient = merge(before.grad, GRADIENT.get(source, source), group)
    torch.testing.assert_close(gradient, cotangent)
    assert recorder.records == [
        CollectiveRecord(str(action), "b", max(before.nbytes, after.nbytes), direction)
        for action, direction in ((planned.forward, "forward"), (planned.backward, "backward"))
        if action in {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    ]


def check_without_gradient(source: str, target: str, dtype: torch.dtype) -> None:
    device_mesh = mesh(4)
    group = device_mesh.get_group("a")
    (run,) = bind_steps([step(source, target, axis="a")], device_mesh, SHAPE)
    value = logical(1, dtype)
    after = run(cut(value, source, group).to(dtype))
    assert after.dtype == dtype
    assert not after.requires_grad
    torch.testing.assert_close(merge(after, target, group).to(dtype), value)


def check_masks_keep_the_first_rank() -> None:
    device_mesh = mesh(2, 2)
    group = device_mesh.get_group("a")
    value = logical(1, torch.float32)
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
    value = logical(1, torch.float32)
    steps = [step("S(0)", "R", axis=name) for name in ("a", "b")]
    mine = value[2 * column + row : 2 * column + row + 1]
    for run in bind_steps(steps, device_mesh, SHAPE):
        mine = run(mine)
    torch.testing.assert_close(mine, value)


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
IN_CHUNKS = [
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
FREE_DTYPES = {"bool": torch.bool, "int64": torch.int64, "bfloat16": torch.bfloat16}
CASES: dict[str, Callable[[], None]] = {
    **{f"{s}->{t}": partial(check_step, s, t) for s, t in (*PAIRS, *IN_CHUNKS)},
    **{f"{s}->{t} in bfloat16": partial(check_step, s, t, torch.bfloat16) for s, t in PAIRS},
    **{
        f"{s}->{t} of {name} without gradient": partial(check_without_gradient, s, t, dtype)
        for s, t in UNDIFFERENTIATED
        for name, dtype in FREE_DTYPES.items()
        if name != "bool" or "P" not in (s, t)
    },
    "masks keep the first rank": check_masks_keep_the_first_rank,
    "an axis of one rank": check_step_on_an_axis_of_one_rank,
    "expanded gradient": check_expanded_gradient,
    "chain": check_chain,
    "foreign collectives": check_foreign_collectives_are_seen,
    "unknown axis": check_unknown_axis,
}


def test_every_pair_of_the_table_is_a_case() -> None:
    assert {(Kind(s[0]), Kind(t[0])) for s, t in PAIRS} == set(STEPS)


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_step(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
