"""Devices fitted to synthetic measurements of known devices, and their files."""

from dataclasses import replace
from itertools import product

import pytest

from autoshard.errors import MeshError
from autoshard.mesh import (
    Device,
    OperatorFit,
    RooflineFit,
    get_topology,
    make_mesh,
    topology_from_json,
    topology_to_json,
)
from autoshard.mesh.calibration import (
    TILES,
    CopySample,
    OperatorSample,
    ProductSample,
    fit_device,
    fit_operators,
)
from autoshard.mesh.topology import MATMUL_EFFICIENCY, MAX_OPERATORS

EXTENTS = [*((n, n, n) for n in (64, 256, 1024)), *product((16, 512), (64, 256), (32, 300))]
COPIES = [CopySample(4e9, 1 + 1e-4), CopySample(8e9, 2 + 1e-4), CopySample(1.0, 1e-5)]
DEVICE = Device("made up", {"float32": 1e10}, memory_bandwidth=1e9, memory=1 << 30)


def products(dtype: str, peak: float, tile: float) -> list[ProductSample]:
    """Products by the formula of the cost model, with a launch."""
    found = []
    for extents in EXTENTS:
        efficiency = MATMUL_EFFICIENCY
        flops = 2.0
        for extent in extents:
            efficiency *= extent / (extent + tile)
            flops *= extent
        found.append(ProductSample(dtype, extents, 1e-4 + flops / (peak * efficiency)))
    return found


@pytest.mark.parametrize("tile", TILES)
def test_a_fit_finds_the_device_that_made_the_measurements(tile: int) -> None:
    made = products("float32", 2e10, tile) + products("bfloat16", 5e10, tile)
    found = fit_device("made up", COPIES, made, launch_overhead=1e-4, memory=1 << 30)
    assert found.tile == tile
    assert found.peak("float32") == pytest.approx(2e10)
    assert found.peak("bfloat16") == pytest.approx(5e10)
    assert found.memory_bandwidth == pytest.approx(4e9)
    assert found.launch_overhead == 1e-4


def test_a_device_needs_copies_and_products_in_float32() -> None:
    with pytest.raises(MeshError, match="no copy takes longer"):
        fit_device("fast", [COPIES[2]], products("float32", 1e9, 8), 1e-4, 1)
    with pytest.raises(MeshError, match="float32"):
        fit_device("odd", COPIES, products("bfloat16", 1e9, 8), 1e-4, 1)


def operator(
    name: str,
    category: str,
    forward: RooflineFit,
    backward: RooflineFit,
    *,
    seconds: tuple[float, ...],
) -> list[OperatorSample]:
    return [
        OperatorSample(
            name,
            category,
            (work, forward.overhead + forward.times * work),
            (2 * work, backward.overhead + backward.times * 2 * work),
        )
        for work in seconds
    ]


def test_operator_fits_are_found_by_name_and_by_category() -> None:
    known = {
        "aten.mul.Tensor": OperatorFit(RooflineFit(1e-5, 1.2), RooflineFit(2e-5, 1.5)),
        "aten.tanh.default": OperatorFit(RooflineFit(2e-5, 3.0), RooflineFit(3e-5, 2.0)),
        "aten.exp.default": OperatorFit(RooflineFit(3e-5, 2.0), RooflineFit(4e-5, 2.5)),
    }
    made = [
        sample
        for name, fits in known.items()
        for sample in operator(
            name, "stream", fits.forward, fits.backward, seconds=(1e-5, 1e-4, 1e-3)
        )
    ]
    view = operator(
        "aten.view.default",
        "view",
        RooflineFit(7e-6, 0),
        RooflineFit(8e-6, 0),
        seconds=(1e-5, 1e-3),
    )
    found = fit_operators(DEVICE, made + view).operators
    for name, fits in known.items():
        for side, expected in (
            (found[name].forward, fits.forward),
            (found[name].backward, fits.backward),
        ):
            assert side.overhead == pytest.approx(expected.overhead)
            assert side.times == pytest.approx(expected.times)
    assert found["stream"].forward.overhead == pytest.approx(2e-5)
    assert found["stream"].forward.times == pytest.approx(2.0)
    assert found["stream"].backward.times == pytest.approx(2.0)
    assert found["view"].forward.overhead == pytest.approx(7e-6)
    assert found["view"].backward.times == pytest.approx(0.0, abs=1e-9)


def test_an_operator_without_a_gradient_has_no_backward() -> None:
    found = fit_operators(
        DEVICE, [OperatorSample("aten.ne.Scalar", "stream", (1e-3, 2e-3), (0.0, 1e-6))]
    )
    assert found.operators["stream"].backward == RooflineFit(0.0, 0.0)


def test_fits_survive_a_file() -> None:
    device = replace(
        DEVICE,
        operators={"view": OperatorFit(RooflineFit(1e-6, 0.0), RooflineFit(2e-6, 0.5))},
        tile=4.0,
    )
    topology = replace(get_topology("cpu-10gbe"), device=device)
    assert topology_from_json(topology_to_json(topology)) == topology
    with pytest.raises(MeshError, match=r"device.operators.view.forward.speed"):
        topology_from_json(topology_to_json(topology).replace('"times"', '"speed"', 1))


@pytest.mark.parametrize("wrong", [-1.0, float("inf"), float("nan")])
def test_operator_fits_are_numbers(wrong: float) -> None:
    with pytest.raises(MeshError, match="overhead of an operator"):
        RooflineFit(wrong, 1.0)
    with pytest.raises(MeshError, match="times of an operator"):
        RooflineFit(0.0, wrong)
    with pytest.raises(MeshError, match="tile of device"):
        replace(DEVICE, tile=wrong)


def test_operator_fits_are_not_too_many() -> None:
    fits = OperatorFit(RooflineFit(0.0, 1.0), RooflineFit(0.0, 1.0))
    with pytest.raises(MeshError, match=f"limit is {MAX_OPERATORS}"):
        replace(DEVICE, operators={str(i): fits for i in range(MAX_OPERATORS + 1)})


def test_presets_have_no_operator_fits() -> None:
    device = make_mesh((8,)).topology.device
    assert not device.operators
    assert device.tile == 32
