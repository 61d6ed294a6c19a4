from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from support.prices import Prices

from autoshard.errors import LayoutError
from autoshard.layouts import (
    STEPS,
    Action,
    AxisType,
    ChainCosts,
    Charge,
    I,
    Kind,
    Layout,
    P,
    R,
    ReshardingTable,
    S,
    Step,
    step_price,
)
from autoshard.layouts.steps import STEP_OVERHEAD

SIZES = (2, 4)
SHAPE = (8, 16)


def reshardings(
    *, differentiable: bool = True, backward: bool = True, interleaved: tuple[AxisType, ...] = ()
) -> ReshardingTable:
    return ReshardingTable(
        SHAPE,
        4,
        SIZES,
        differentiable=differentiable,
        backward=backward,
        interleaved=interleaved,
        pricer=Prices(),
    )


INTERLEAVED = (S(1, (1, 1)), S(1, (2, 1, 1)))


TABLE = """
I R nothing        all_reduce
I S slice          all_gather
I P mask           nothing
R I nothing        mask
R S slice          pad
R P mask           mask
S I all_gather     slice
S R all_gather     reduce_scatter
S S all_to_all     all_to_all
P I all_reduce     nothing
P R all_reduce     all_reduce
P S reduce_scatter all_gather
"""


def test_the_table_of_steps_is_the_specification() -> None:
    rows = [line.split() for line in TABLE.split("\n") if line]
    assert {(Kind(a), Kind(b)): (Action(f), Action(g)) for a, b, f, g in rows} == STEPS


def test_the_transpose_of_a_step_is_the_step_of_the_transposed_types() -> None:
    """The gradient of a -> b reshards b's gradient type to a's, so the pair must be dual."""
    dual = {
        Kind.INVARIANT: Kind.INVARIANT,
        Kind.REPLICATE: Kind.PARTIAL,
        Kind.PARTIAL: Kind.REPLICATE,
        Kind.SHARD: Kind.SHARD,
    }
    for (a, b), (_, backward) in STEPS.items():
        if (a, b) != (Kind.REPLICATE, Kind.SHARD):
            assert STEPS[dual[b], dual[a]][0] is backward, (a, b)
    assert (Kind.SHARD, Kind.PARTIAL) not in STEPS, "the dual of R -> S is not offered"


def all_costs(table: ReshardingTable) -> ChainCosts:
    every = np.arange(len(table.layouts))
    return table.costs(every, every)


def test_every_layout_leads_to_every_other() -> None:
    for table in (
        reshardings(),
        reshardings(differentiable=False),
        reshardings(interleaved=INTERLEAVED),
    ):
        assert np.isfinite(all_costs(table).seconds).all()


def test_reshardings_obey_the_triangle_inequality() -> None:
    cost = all_costs(reshardings()).seconds
    best_detour = (cost[:, :, None] + cost[None, :, :]).min(axis=1)
    assert (cost <= best_detour + 1e-15).all()
    assert (np.diag(cost) == 0).all()


def test_without_a_gradient_nothing_runs_backward() -> None:
    table = reshardings(differentiable=False)
    assert all("I" not in str(layout) for layout in table.layouts)
    for source, target in product(table.layouts, repeat=2):
        assert all(step.backward is Action.NOTHING for step in table.path(source, target))


def test_an_unpriced_backward_leaves_the_types() -> None:
    (step,) = reshardings(backward=False).path(Layout.parse("I,I"), Layout.parse("R,I"))
    assert step.backward is Action.NOTHING
    assert step_price(step, Prices()).total < 1e-8


def test_data_parallel_is_invariant_to_replicate() -> None:
    (step,) = reshardings().path(Layout.parse("I,I"), Layout.parse("I,R"))
    assert (step.forward, step.backward) == (Action.NOTHING, Action.ALL_REDUCE)
    assert step.nbytes == 8 * 16 * 4


def test_fully_sharded_is_shard_to_replicate() -> None:
    (step,) = reshardings().path(Layout.parse("I,S(0)"), Layout.parse("I,R"))
    assert (step.forward, step.backward) == (Action.ALL_GATHER, Action.REDUCE_SCATTER)
    assert step.nbytes == 8 * 16 * 4


@pytest.mark.parametrize("source", ["I,I", "I,S(0)"])
def test_what_makes_a_tensor_whole_pays_its_part_of_a_collective_for_many(source: str) -> None:
    (step,) = reshardings().path(Layout.parse(source), Layout.parse("I,R"))
    eightfold = replace(step, nbytes=8 * step.nbytes)
    part = (step_price(eightfold, Prices()).total - STEP_OVERHEAD) / 8
    assert step_price(step, Prices(), Charge(8)).total == pytest.approx(part + STEP_OVERHEAD)
    assert step_price(step, Prices(), Charge(8)).total < step_price(step, Prices()).total
    price = step_price(step, Prices(), Charge(8))
    assert price.forward <= price.total


@pytest.mark.parametrize("ends", [("P,I", "I,I"), ("S(0),I", "S(1),I"), ("S(0),I", "I,I")])
def test_what_else_a_tensor_goes_through_shares_nothing(ends: tuple[str, str]) -> None:
    (step,) = reshardings().path(*map(Layout.parse, ends))
    assert step_price(step, Prices(), Charge(8)).total == step_price(step, Prices()).total


def test_a_table_of_a_tensor_that_shares_collectives_has_lower_prices() -> None:
    alone = ReshardingTable(SHAPE, 4, SIZES, differentiable=True, pricer=Prices())
    shared = ReshardingTable(
        SHAPE, 4, SIZES, differentiable=True, pricer=Prices(), charge=Charge(8)
    )
    ends = (alone.index[Layout.parse(text)] for text in ("I,S(0)", "I,R"))
    source, target = ends
    (step,) = alone.path(alone.layouts[source], alone.layouts[target])
    costs = all_costs(shared)
    price = step_price(step, Prices(), Charge(8))
    assert costs.seconds[source, target] == pytest.approx(price.total)
    assert costs.forward[source, target] == pytest.approx(price.forward)
    assert (costs.seconds <= all_costs(alone).seconds).all()


def test_chains_are_the_same_whatever_was_asked_before() -> None:
    """Of many layouts, chains are computed from those that are asked for."""
    tables = [
        ReshardingTable((8, 16, 32), 4, (2, 4, 2), differentiable=True, pricer=Prices())
        for _ in range(2)
    ]
    every = np.arange(len(tables[0].layouts))
    assert len(every) > 100
    at_once = tables[0].costs(every, every)
    for sources in (np.array([70, 3]), np.array([3, 150, 70]), every[::-1]):
        found = tables[1].costs(sources, every[::2])
        for name in ("seconds", "forward", "is_noop", "waiting", "is_bucketable"):
            assert (getattr(found, name) == getattr(at_once, name)[sources][:, ::2]).all()


def test_the_costs_of_a_chain_are_those_of_its_steps() -> None:
    table = ReshardingTable((8, 16, 32), 4, (2, 4, 2), differentiable=True, pricer=Prices())
    every = np.arange(len(table.layouts))
    costs = table.costs(every[::7], every[::5])
    for (i, source), (j, target) in product(
        enumerate(table.layouts[::7]), enumerate(table.layouts[::5])
    ):
        steps = table.path(source, target)
        total = sum(step_price(step, Prices()).total for step in steps)
        assert costs.seconds[i, j] == pytest.approx(total)
        forward = sum(step_price(step, Prices()).forward for step in steps)
        assert costs.forward[i, j] == pytest.approx(forward)
        assert costs.is_bucketable[i, j] == all(step.is_bucketable for step in steps)
        assert costs.is_noop[i, j] == all(step.forward is Action.NOTHING for step in steps)


def test_the_outer_axis_is_gathered_through_the_inner_one() -> None:
    """Dim 0 is sharded by axis 0 and, inside, by axis 1: axis 1 must give way first."""
    steps = reshardings().path(Layout.parse("S(0),S(0)"), Layout.parse("R,S(0)"))
    assert steps[0].axes == (1,)
    assert [s.axes for s in steps].count((0,)) == 1
    assert len(steps) == 3


def test_other_sub_shards_of_a_dim_are_reached_through_another_shard_or_the_whole() -> None:
    table = reshardings(interleaved=INTERLEAVED)
    steps = table.path(Layout.parse("I,S(1)"), Layout.parse("I,S(1)/1+1"))
    assert len(steps) == 2
    assert steps[0].target.dim != 1


def test_a_swapped_nesting_is_another_layout() -> None:
    assert reshardings().path(Layout.parse("S(0),S(0)"), Layout.parse("S(0),S(0);1>0"))


def test_a_mesh_of_one_device_reshards_nothing() -> None:
    table = ReshardingTable(SHAPE, 4, (), differentiable=True, pricer=Prices())
    assert table.path(Layout(()), Layout(())) == ()
    assert table.cost(Layout(()), Layout(())) == 0.0


def test_an_illegal_layout_is_named() -> None:
    with pytest.raises(LayoutError, match=r"S\(0\),S\(0\).*\(6, 16\)"):
        ReshardingTable((6, 16), 4, SIZES, differentiable=True, pricer=Prices()).path(
            Layout.parse("S(0),S(0)"), Layout.parse("R,R")
        )


def test_steps_change_one_axis_each() -> None:
    table = reshardings()
    for source, target in product(table.layouts, repeat=2):
        steps: tuple[Step, ...] = table.path(source, target)
        assert all(not (a.axes == b.axes and a.target != b.source) for a, b in pairwise(steps))


GROUPS = ((0, 1),)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("S(0),S(0)", "R,R"),
        ("S(0),S(0)", "S(1),S(1)"),
        ("P,P", "I,I"),
        ("P,P", "S(0),S(0)"),
        ("I,I", "R,R"),
    ],
)
def test_axes_of_one_type_communicate_as_one_group(source: str, target: str) -> None:
    alone = ReshardingTable(SHAPE, 4, SIZES, differentiable=True, pricer=Prices())
    joint = ReshardingTable(SHAPE, 4, SIZES, groups=GROUPS, differentiable=True, pricer=Prices())
    ends = Layout.parse(source), Layout.parse(target)
    (step,) = joint.path(*ends)
    assert step.axes == (0, 1)
    whole = 8 * 16 * 4
    assert step.nbytes == (whole // 8 if source.startswith("S") and "S" in target else whole)
    assert joint.cost(*ends) < alone.cost(*ends)


@pytest.mark.parametrize("source", ["S(0),S(0);1>0", "S(0),R", "S(0),S(1)"])
def test_axes_in_another_order_or_of_other_types_do_not(source: str) -> None:
    joint = ReshardingTable(SHAPE, 4, SIZES, groups=GROUPS, differentiable=True, pricer=Prices())
    layout = Layout.parse(source)
    assert joint.path(layout, Layout.parse("R,R"))[0].axes != GROUPS[0]


def test_uneven_slices_are_not_gathered_over_several_axes() -> None:
    joint = ReshardingTable(
        (10, 4), 4, (4, 2), groups=GROUPS, differentiable=False, pricer=Prices()
    )
    for source, target in product(joint.layouts, repeat=2):
        for step in joint.path(source, target):
            assert len(step.axes) == 1 or {step.source.dim, step.target.dim} <= {-1, 1}


HALVES = (S(1, (1, 1)),)


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize(("shape", "sizes"), [((8, 16), (2, 4)), ((16,), (2, 2, 4)), ((), (2,))])
def test_steps_are_those_of_single_layouts(
    shape: tuple[int, ...], sizes: tuple[int, ...], *, differentiable: bool
) -> None:
    interleaved = HALVES if len(shape) > 1 else ()
    shards = [*(S(d) for d in range(len(shape))), *interleaved]
    ends = combinations(range(len(sizes) + 1), 2)
    groups = tuple(tuple(range(a, b)) for a, b in ends if b - a > 1)
    priced = ReshardingTable(
        shape,
        4,
        sizes,
        groups=groups,
        differentiable=differentiable,
        interleaved=interleaved,
        pricer=Prices(),
    )
    alone = [(axis,) for axis in range(len(sizes))]
    expected = set()
    for i, layout in enumerate(priced.layouts):
        for axes, new in product([*alone, *groups], [I, R, P, *shards]):
            old = layout.types[axes[0]]
            actions = STEPS.get((old.kind, new.kind))
            if old == new or actions is None:
                continue
            if len(axes) > 1 and not any(action.is_collective for action in actions):
                continue
            try:
                after = layout.replace_all(axes, new)
            except LayoutError:
                continue
            if after in priced.index:
                expected.add((i, priced.index[after]))
    sources, targets, _ = priced.steps
    pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == expected


class _InnerDims(Prices):
    """Collectives of another dim than the first cost a second more."""

    def collective_time(
        self, action: str, axis: int | tuple[int, ...], nbytes: int, *, inner: bool = False
    ) -> float:
        return super().collective_time(action, axis, nbytes) + inner


@pytest.mark.parametrize(
    ("before", "after", "num_inner"),
    [
        ("S(0)", "R", 0),
        ("S(1)", "R", 2),
        ("S(1)", "I", 1),
        ("P", "S(0)", 0),
        ("P", "S(1)", 2),
        ("S(0)", "S(1)", 2),
        ("I", "R", 0),
    ],
)
def test_a_step_says_whether_it_moves_slices_of_an_inner_dim(
    before: str, after: str, num_inner: int
) -> None:
    found = ReshardingTable((8, 8), 4, (2,), differentiable=True, pricer=_InnerDims())
    plain = ReshardingTable((8, 8), 4, (2,), differentiable=True, pricer=Prices())
    sources, targets, prices = found.steps
    step = (sources == found.index[Layout.parse(before)]) & (
        targets == found.index[Layout.parse(after)]
    )
    (price,) = prices[step]
    (expected,) = plain.steps[2][step]
    assert price == pytest.approx(expected + num_inner)
