"""Rules of operators on images and audio, on simulated ranks, forward and backward."""

from typing import Any

import pytest
from ops.calls import MakeExample, Prove, Values

real = Values(4).real


CONV1D = "aten.conv1d.default"
CONV2D = "aten.conv2d.default"
PADDED = "aten.conv2d.padding"
BACK = "aten.conv_transpose2d.input"
CONVOLUTIONS = [
    (
        CONV2D,
        {"input": real(4, 4, 5, 6), "weight": real(8, 4, 2, 2), "bias": real(8), "stride": [2, 2]},
    ),
    (CONV2D, {"input": real(4, 4, 8, 4), "weight": real(6, 4, 2, 1), "stride": [2, 1]}),
    (CONV2D, {"input": real(2, 4, 4, 4), "weight": real(4, 4, 1, 1), "bias": real(4)}),
    (CONV2D, {"input": real(2, 2, 8, 4), "weight": real(4, 2, 1, 1), "stride": [2]}),
    (CONV2D, {"input": real(2, 2, 7, 4), "weight": real(4, 2, 1, 1), "stride": [2, 2]}),
    (CONV2D, {"input": real(2, 2, 4, 4), "weight": real(4, 2, 1, 1), "padding": [1, 0]}),
    (CONV2D, {"input": real(4, 6, 6), "weight": real(8, 4, 3, 3)}),
    (CONV2D, {"input": real(4, 4, 3, 3), "weight": real(8, 2, 2, 2), "groups": 2}),
    (CONV2D, {"input": real(2, 8, 3, 3), "weight": real(8, 2, 2, 2), "bias": real(8), "groups": 4}),
    (CONV2D, {"input": real(2, 8, 4, 4), "weight": real(16, 1, 3, 3), "padding": [1], "groups": 8}),
    (CONV2D, {"input": real(4, 3, 3), "weight": real(4, 2, 2, 2), "groups": 2}),
    (CONV2D, {"input": real(2, 4, 6, 6), "weight": real(4, 4, 2, 2), "dilation": [2, 2]}),
    (CONV2D, {"input": real(1, 2, 8, 8), "weight": real(2, 2, 2, 2), "stride": [4, 4]}),
    (
        CONV1D,
        {"input": real(4, 4, 6), "weight": real(8, 4, 3), "bias": real(8), "padding": [1]},
    ),
    (CONV1D, {"input": real(2, 4, 8), "weight": real(4, 1, 2), "stride": [2], "groups": 4}),
    (CONV1D, {"input": real(4, 8), "weight": real(2, 4, 2), "stride": [2]}),
    ("aten.conv1d.padding", {"input": real(2, 4, 6), "weight": real(4, 4, 3), "padding": "same"}),
    (
        "aten.conv3d.default",
        {"input": real(2, 2, 4, 4, 2), "weight": real(4, 2, 2, 1, 1), "stride": [2, 1, 1]},
    ),
    (PADDED, {"input": real(2, 4, 5, 5), "weight": real(4, 4, 3, 3), "padding": "same"}),
    (PADDED, {"input": real(2, 4, 4, 4), "weight": real(4, 4, 1, 1), "padding": "same"}),
    (
        PADDED,
        {"input": real(2, 2, 4, 4), "weight": real(4, 2, 2, 2), "padding": "valid"}
        | {"stride": [2, 2]},
    ),
    (
        BACK,
        {"input": real(4, 4, 3, 2), "weight": real(4, 8, 2, 2), "bias": real(8), "stride": [2, 2]},
    ),
    (BACK, {"input": real(2, 4, 3, 3), "weight": real(4, 2, 2, 2), "bias": real(4), "groups": 2}),
    (BACK, {"input": real(2, 4, 4, 4), "weight": real(4, 4, 3, 3), "stride": [2, 2]}),
    (
        BACK,
        {"input": real(1, 4, 4, 4), "weight": real(4, 2, 1, 1), "stride": [2, 2], "groups": 4}
        | {"output_padding": [1, 1]},
    ),
    (
        "aten.conv_transpose1d.default",
        {"input": real(2, 4, 4), "weight": real(4, 6, 2), "stride": [2]},
    ),
    (
        "aten.conv_transpose3d.input",
        {"input": real(2, 2, 2, 4, 2), "weight": real(2, 4, 2, 2, 1), "stride": [2, 2, 1]},
    ),
]

IMAGE = real(4, 4, 6, 8)
POOLING = [
    ("aten.max_pool2d.default", {"self": IMAGE, "kernel_size": [2, 2]}),
    (
        "aten.max_pool2d.default",
        {"self": IMAGE, "kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1]},
    ),
    ("aten.max_pool1d.default", {"self": real(4, 6, 8), "kernel_size": [2], "dilation": [2]}),
    ("aten.max_pool3d.default", {"self": real(2, 2, 4, 4, 4), "kernel_size": [2]}),
    ("aten.avg_pool2d.default", {"self": IMAGE, "kernel_size": [2, 2]}),
    ("aten.avg_pool2d.default", {"self": IMAGE, "kernel_size": [3, 2], "ceil_mode": True}),
    ("aten.avg_pool1d.default", {"self": real(4, 6, 8), "kernel_size": [1], "stride": [2]}),
    ("aten.avg_pool3d.default", {"self": real(2, 2, 4, 4, 4), "kernel_size": [2, 2, 2]}),
    ("aten.adaptive_avg_pool1d.default", {"self": real(4, 6, 8), "output_size": [4]}),
    ("aten.adaptive_avg_pool2d.default", {"self": IMAGE, "output_size": [1, 1]}),
    ("aten.adaptive_avg_pool2d.default", {"self": real(4, 6, 8), "output_size": [1, 1]}),
    ("aten.adaptive_avg_pool2d.default", {"self": IMAGE, "output_size": [3, 2]}),
    ("aten.adaptive_avg_pool3d.default", {"self": real(2, 2, 4, 2, 4), "output_size": [1, 1, 1]}),
]

NEAREST = "aten.upsample_nearest2d.vec"
RESAMPLING = [
    (NEAREST, {"input": IMAGE, "output_size": None, "scale_factors": [2.0, 3.0]}),
    (NEAREST, {"input": IMAGE, "output_size": None, "scale_factors": [1.5, 2.0]}),
    (NEAREST, {"input": IMAGE, "output_size": [12, 16], "scale_factors": None}),
    (
        "aten.upsample_nearest1d.vec",
        {"input": real(2, 4, 6), "output_size": None, "scale_factors": [2.0]},
    ),
    (
        "aten.upsample_nearest3d.vec",
        {"input": real(2, 2, 2, 4, 2), "output_size": None, "scale_factors": [2.0, 1.0, 2.0]},
    ),
    *(
        (
            f"aten.upsample_{name}.vec",
            {"input": real(2, 4, *shape), "output_size": size, "align_corners": corners}
            | {"scale_factors": None if size else [2.0] * len(shape)},
        )
        for name, shape, size, corners in (
            ("linear1d", (6,), None, False),
            ("linear1d", (6,), [9], True),
            ("bilinear2d", (4, 6), None, False),
            ("bilinear2d", (4, 6), [5, 5], True),
            ("bicubic2d", (4, 6), None, False),
            ("trilinear3d", (2, 4, 2), None, False),
        )
    ),
    *(
        (
            "aten.grid_sampler.default",
            {"input": real(2, 4, *shape), "grid": real(2, *places, len(shape)).clamp(-1, 1)}
            | {"interpolation_mode": mode, "padding_mode": 0, "align_corners": False},
        )
        for shape, places, mode in (
            ((4, 6), (6, 2), 0),
            ((4, 6), (3, 4), 1),
            ((2, 4, 2), (2, 2, 2), 0),
        )
    ),
]

CASES = [*CONVOLUTIONS, *POOLING, *RESAMPLING]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("operator", "arguments"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_rule_is_true(operator: str, arguments: Any, example: MakeExample, prove: Prove) -> None:
    prove(example(operator, **arguments))


def test_groups_of_channels_are_sharded(example: MakeExample, prove: Prove) -> None:
    depthwise = {"input": real(2, 8, 4, 4), "weight": real(8, 1, 3, 3), "padding": [1, 1]}
    found = prove(example(CONV2D, **depthwise, groups=8))
    assert found == {
        "I I -> I",
        "R R -> R",
        "S(0) R -> S(0)",
        "S(1) S(0) -> S(1)",
        "S(2) R -> S(2)",
        "S(3) R -> S(3)",
        "P R -> P",
        "R P -> P",
    }


def test_channels_of_one_group_are_sharded_as_those_of_a_product(
    example: MakeExample, prove: Prove
) -> None:
    found = prove(example(CONV2D, input=real(2, 4, 4, 4), weight=real(8, 4, 3, 3), bias=real(8)))
    assert "S(1) S(1) P -> P" in found
    assert "R S(0) S(0) -> S(1)" in found


def test_patches_are_sharded_and_windows_that_leave_places_over_are_not(
    example: MakeExample, prove: Prove
) -> None:
    image = real(1, 2, 8, 8)
    patches = prove(example(CONV2D, input=image, weight=real(4, 2, 2, 2), stride=[2, 2]))
    assert {"S(2) R -> S(2)", "S(3) R -> S(3)"} <= patches
    windows = prove(example(CONV2D, input=image, weight=real(4, 2, 3, 3), stride=[2, 2]))
    assert not {"S(2) R -> S(2)", "S(3) R -> S(3)"} & windows


def test_pooling_to_one_place_is_a_mean(example: MakeExample, prove: Prove) -> None:
    found = prove(example("aten.adaptive_avg_pool2d.default", self=IMAGE, output_size=[1, 1]))
    assert {"S(2) -> P", "S(3) -> P"} <= found
