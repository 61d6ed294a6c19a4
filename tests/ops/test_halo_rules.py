"""Overlapping windows: with halo exchange, ranks compute the unsharded result."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops.calls import MakeExample, Prove, Values

from autoshard.errors import PlanError
from autoshard.layouts import Layout, R, S
from autoshard.ops import InnerCollective, Operation, Strategy, rule_for, strategies

VALUES = Values(5)
real = VALUES.real


CONV1D, CONV2D, CONV3D = (f"aten.conv{rank}d.default" for rank in (1, 2, 3))
SAME = "aten.conv2d.padding"
BACK1D, BACK2D = "aten.conv_transpose1d.default", "aten.conv_transpose2d.input"
BILINEAR = "aten.upsample_bilinear2d.vec"
NEAREST = "aten.upsample_nearest2d.vec"
MAX, MEAN = "aten.max_pool2d.default", "aten.avg_pool2d.default"
ALONE = {"count_include_pad": False}
GIVEN = {"output_size": None, "align_corners": False}

IMAGE, FILTERS = real(1, 2, 12, 3), real(2, 2, 3, 3)
TIES = torch.randint(0, 3, (1, 2, 12, 4), generator=VALUES.generator).double()
CASES: list[tuple[str, dict[str, Any], tuple[int, int]]] = [
    # convolutions: of the kernel's extent, less a stride, the padding comes from before
    (CONV2D, {"input": IMAGE, "weight": FILTERS, "bias": real(2), "padding": [1, 1]}, (1, 1)),
    (CONV2D, {"input": real(2, 12, 3), "weight": FILTERS, "padding": [1]}, (1, 1)),
    (
        CONV2D,
        {"input": real(1, 2, 24, 3), "weight": FILTERS, "stride": [2, 2], "padding": [1, 1]},
        (1, 0),
    ),
    (
        CONV2D,
        {"input": real(1, 1, 24, 4), "weight": real(2, 1, 7, 1), "stride": [2, 1]}
        | {"padding": [3, 0]},
        (3, 2),
    ),
    (
        CONV2D,
        {"input": real(1, 2, 12, 2), "weight": real(2, 2, 3, 1), "bias": real(2)}
        | {"padding": [2, 0], "dilation": [2, 1]},
        (2, 2),
    ),
    (
        CONV2D,
        {"input": real(1, 1, 24, 3), "weight": real(2, 1, 4, 2), "stride": [2, 1]}
        | {"padding": [1, 1]},
        (1, 1),
    ),
    (
        CONV2D,
        {"input": real(1, 1, 36, 3), "weight": real(2, 1, 3, 3), "stride": [3, 1]}
        | {"padding": [1, 0]},
        (1, 0),
    ),
    (CONV2D, {"input": IMAGE, "weight": real(2, 1, 3, 3), "groups": 2, "padding": [1, 1]}, (1, 1)),
    (
        CONV2D,
        {"input": real(1, 4, 12, 2), "weight": real(4, 2, 3, 1), "bias": real(4), "groups": 2}
        | {"padding": [1, 0]},
        (1, 1),
    ),
    (SAME, {"input": IMAGE, "weight": real(2, 2, 5, 1), "padding": "same"}, (2, 2)),
    (CONV1D, {"input": real(1, 2, 12), "weight": real(2, 2, 3), "padding": [1]}, (1, 1)),
    (
        CONV3D,
        {"input": real(1, 1, 12, 2, 2), "weight": real(2, 1, 3, 1, 1), "padding": [1, 0, 0]},
        (1, 1),
    ),
    # transposed ones
    (
        BACK2D,
        {"input": IMAGE, "weight": real(2, 2, 4, 3), "bias": real(2), "stride": [2, 1]}
        | {"padding": [1, 1]},
        (1, 1),
    ),
    (
        BACK2D,
        {"input": IMAGE, "weight": FILTERS, "stride": [2, 2], "padding": [1, 1]}
        | {"output_padding": [1, 1]},
        (0, 1),
    ),
    (
        BACK2D,
        {"input": real(2, 12, 3), "weight": real(2, 1, 3, 1), "padding": [1, 0], "groups": 2},
        (1, 1),
    ),
    (
        BACK1D,
        {"input": real(1, 2, 12), "weight": real(2, 2, 5), "stride": [2], "padding": [2]}
        | {"output_padding": [1]},
        (1, 1),
    ),
    (
        BACK1D,
        {"input": real(1, 1, 12), "weight": real(1, 2, 3), "padding": [2], "dilation": [2]},
        (2, 2),
    ),
    # pooling: nothing beyond the ends is larger, and a mean may count what exists
    (MAX, {"self": real(1, 2, 24, 3), "kernel_size": [3], "stride": [2, 1], "padding": 1}, (1, 0)),
    (MAX, {"self": TIES, "kernel_size": [3, 3], "stride": [1, 1], "padding": [1, 1]}, (1, 1)),
    (
        MAX,
        {"self": TIES, "kernel_size": [2, 1], "stride": [1], "dilation": [2, 1]}
        | {"padding": [1, 0]},
        (1, 1),
    ),
    (
        MAX,
        {"self": real(1, 2, 24, 4), "kernel_size": [3, 2], "stride": [2, 2], "ceil_mode": True},
        (0, 1),
    ),
    (
        "aten.max_pool1d.default",
        {"self": real(1, 2, 24), "kernel_size": [5], "stride": [2], "padding": [2]},
        (2, 1),
    ),
    (
        "aten.max_pool3d.default",
        {
            "self": real(1, 1, 12, 2, 2),
            "kernel_size": [3, 1, 1],
            "stride": [1],
            "padding": [1, 0, 0],
        },
        (1, 1),
    ),
    *(
        (
            MEAN,
            {"self": IMAGE, "kernel_size": [3, 3], "stride": [1, 1], "padding": [1, 1], **more},
            (1, 1),
        )
        for more in ({}, ALONE, {"divisor_override": 5, **ALONE})
    ),
    (
        "aten.avg_pool1d.default",
        {"self": real(1, 2, 24), "kernel_size": [4], "stride": [2], "padding": [1], **ALONE},
        (1, 1),
    ),
    (
        "aten.avg_pool3d.default",
        {"self": real(1, 12, 2, 2), "kernel_size": [3, 1, 1], "stride": [1], "padding": [1, 0, 0]},
        (1, 1),
    ),
]
CASES += [
    (
        f"aten.upsample_{name}.vec",
        {"input": image, "scale_factors": scales, **GIVEN},
        (reach, reach),
    )
    for name, image, scales, reach in (
        ("linear1d", real(1, 2, 12), [2.0], 1),
        ("bilinear2d", real(1, 1, 12, 2), [3.0, 1.5], 1),
        ("bicubic2d", real(1, 1, 12, 2), [2.0, 1.0], 2),
        ("trilinear3d", real(1, 1, 12, 1, 2), [2.0, 1.0, 1.0], 1),
    )
]
IDS = [f"{number}-{case[0].split('.')[1]}" for number, case in enumerate(CASES)]


@pytest.mark.matrix
@pytest.mark.parametrize(("operator", "arguments", "edges"), CASES, ids=IDS)
def test_windows_across_the_ends_of_slices(
    operator: str,
    arguments: dict[str, Any],
    edges: tuple[int, int],
    example: MakeExample,
    prove: Prove,
) -> None:
    made = example(operator, **arguments)
    rule = rule_for(made.call)
    dim = len(made.call.inputs[0].shape) - int(operator.split("d.", maxsplit=1)[0][-1])
    assert (dim, *edges) in rule.halo.edges.values()
    sharded = prove(made, meshes=((2,), (4,), (3,)))
    assert any(text.startswith(f"S({dim}) ") and f"-> S({dim})" in text for text in sharded)


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (CONV2D, {"input": real(1, 2, 6, 6), "weight": FILTERS, "padding": [1, 1]}),
        (
            CONV2D,
            {"input": real(1, 1, 8, 4), "weight": real(1, 1, 4, 3), "stride": [2, 1]}
            | {"padding": [1, 1]},
        ),
        (
            BACK2D,
            {"input": real(1, 2, 4, 4), "weight": real(2, 2, 4, 3), "stride": [2, 1]}
            | {"padding": [1, 1]},
        ),
        (MAX, {"self": real(2, 4, 4), "kernel_size": [3], "stride": [1], "padding": [1]}),
        (
            MEAN,
            {"self": real(2, 4, 4), "kernel_size": [3], "stride": [1], "padding": [1], **ALONE},
        ),
        (BILINEAR, {"input": real(1, 1, 4, 4), "scale_factors": [2.0, 2.0], **GIVEN}),
    ],
    ids=["convolution", "strided", "transposed", "largest", "mean", "bilinear"],
)
def test_corners_come_with_the_second_exchange(
    operator: str, arguments: dict[str, Any], example: MakeExample, simulation: Callable[..., Any]
) -> None:
    made = example(operator, **arguments)
    both = [
        strategy
        for strategy in strategies(rule_for(made.call), (2, 2))
        if len([c for c in strategy.collectives if not c.backward]) > 1
    ]
    assert len(both) == 2
    for strategy in both:
        simulation(made, strategy, (2, 2)).check()
        axes = [(c.axis, c.backward) for c in strategy.collectives]
        forward, backward = axes[:2], axes[2:]
        assert [axis for axis, _ in forward] == [axis for axis, _ in reversed(backward)]


def test_bytes_are_those_of_the_rank_that_has_two_neighbours(example: MakeExample) -> None:
    """Of 8 rows of 3 numbers and 2 channels, 2 go down and 1 goes up."""
    arguments = {"input": real(1, 2, 24, 3), "weight": real(2, 2, 5, 1), "stride": [2, 1]}
    call = example(CONV2D, **arguments, padding=[2, 0]).call
    row, extended = 8 * 2 * 3, 8 * 2 * 3 * (8 + 3)

    def exchanges(num_ranks: int) -> tuple[InnerCollective, ...]:
        found = strategies(rule_for(call), (num_ranks,))
        (sharded,) = (s for s in found if s.inputs[0].types == (S(2),))
        return sharded.collectives

    forward, backward = exchanges(3)
    assert forward == InnerCollective(0, Operation.HALO, 3 * row, backward=False, copied=extended)
    copied = extended + row * 8  # the extended slice once more, and the gradient of the slice
    assert backward == InnerCollective(0, Operation.HALO, 3 * row, backward=True, copied=copied)
    assert [c.nbytes for c in exchanges(2)] == [2 * row, 2 * row]


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        # there are less windows than places
        (CONV2D, {"input": real(1, 1, 8, 1), "weight": real(1, 1, 3, 1)}),
        (CONV2D, {"input": real(1, 1, 7, 1), "weight": real(1, 1, 3, 1), "stride": [2, 1]}),
        # slices are shorter than an edge
        (CONV2D, {"input": real(1, 1, 4, 1), "weight": real(1, 1, 7, 1), "padding": [3, 0]}),
        (MAX, {"self": real(1, 4, 1), "kernel_size": [7, 1], "stride": [1], "padding": [3, 0]}),
        # slices are not even
        (CONV2D, {"input": real(1, 1, 9, 1), "weight": real(1, 1, 3, 1), "padding": [1, 0]}),
        # more padding behind than before
        (SAME, {"input": real(1, 1, 8, 1), "weight": real(1, 1, 4, 1), "padding": "same"}),
        # places without a window
        (
            BACK1D,
            {"input": real(1, 1, 4), "weight": real(1, 1, 2), "stride": [4], "padding": [1]}
            | {"output_padding": [3]},
        ),
        # windows at the end that are cut off count less
        (MEAN, {"self": real(1, 8, 1), "kernel_size": [3, 1], "stride": [2, 1], "ceil_mode": True}),
        # scales are no whole numbers
        (BILINEAR, {"input": real(1, 1, 8, 1), "scale_factors": [1.5, 1.0], **GIVEN}),
        (NEAREST, {"input": real(1, 1, 8, 1), "scale_factors": [2.1, 1.0], "output_size": None}),
        (BILINEAR, {"input": real(1, 1, 8, 1), "scale_factors": [2.1, 1.0], **GIVEN}),
        (
            BILINEAR,
            {"input": real(1, 1, 8, 1), "scale_factors": [2.0, 1.0], "output_size": None}
            | {"align_corners": True},
        ),
    ],
    ids=[
        *("less windows", "odd", "short slices", "short slices of a pool", "uneven"),
        *("more behind", "places without a window", "cut off", "no whole scale"),
        *("nearest of no whole scale", "nearly whole scale", "aligned"),
    ],
)
def test_what_neighbours_cannot_give_is_not_sharded(
    operator: str, arguments: dict[str, Any], example: MakeExample
) -> None:
    call = example(operator, **arguments).call
    dim = len(call.inputs[0].shape) - int(operator.split("d.", maxsplit=1)[0][-1])
    assert not any(s.inputs[0].types == (S(dim),) for s in strategies(rule_for(call), (2,)))


def test_an_axis_knows_its_own_neighbours_only(example: MakeExample) -> None:
    rule = rule_for(example(CONV1D, input=real(1, 2, 16), weight=real(2, 2, 3), padding=[1]).call)
    assert not any(s.inputs[0].types == (S(2), S(2)) for s in strategies(rule, (2, 2)))
    interleaved = [[S(2, (1, 1))], [], [S(2, (1, 1))]]
    found = strategies(rule, (2,), interleaved=interleaved)
    assert not any(t.sub_shards for s in found for t in s.inputs[0].types)


@pytest.mark.parametrize("rows", [9, 3], ids=["odd", "short slices"])
def test_sizes_that_came_later_are_refused_where_slices_do_not_fit(
    rows: int, example: MakeExample, simulation: Callable[..., Any]
) -> None:
    """A plan may run at other sizes than those that it was made for."""
    weights = {"weight": real(1, 1, 5, 1), "stride": [1, 1], "padding": [2, 0]}
    if rows > 3:
        weights = {"weight": real(1, 1, 3, 1), "stride": [2, 1], "padding": [1, 0]}
    planned, given = (example(CONV2D, input=real(1, 1, size, 1), **weights) for size in (12, rows))
    (sharded,) = (
        s for s in strategies(rule_for(planned.call), (3,)) if s.inputs[0].types == (S(2),)
    )
    with pytest.raises(PlanError, match="choose sizes that strides and ranks divide"):
        simulation(given, sharded, (3,)).run_rank((0,), given.values)


def test_a_dim_that_two_axes_shard_has_no_neighbours(
    example: MakeExample, simulation: Callable[..., Any]
) -> None:
    """The planner never shards it so, but a plan from elsewhere may."""
    weight = real(1, 1, 3, 1)
    given = example(CONV2D, input=real(1, 1, 12, 1), weight=weight, padding=[1, 0])
    image, whole = Layout((S(2), S(2))), Layout((R, R))
    sharded = Strategy((image, whole), (image,), {})
    with pytest.raises(PlanError, match="a dim sharded on 2 mesh axes"):
        simulation(given, sharded, (2, 2)).run_rank((0, 0), given.values)
