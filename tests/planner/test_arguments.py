"""What functions take as a graph, a mesh and options, and what they say of anything else."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
import torch
from support.models import meta, mlp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoshard
from autoshard import Client, PlanOptions, check_plan, export_model, make_mesh, make_plan
from autoshard.errors import ArgumentTypeError, AutoshardError, MeshError, OptionError
from autoshard.graph import GraphLike, load_graph
from autoshard.mesh import MeshLike, preset_of_device, to_mesh

MODEL, KWARGS = meta(mlp)


@pytest.fixture(scope="module")
def archive() -> bytes:
    return export_model(MODEL, (), KWARGS)


def exported() -> torch.export.ExportedProgram:
    return torch.export.export(MODEL, (), KWARGS)


@pytest.mark.parametrize("form", ["graph", "bytes", "path", "text", "exported"])
def test_a_graph_may_be_given_in_several_forms(form: str, archive: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(archive)
    graph: GraphLike = {
        "graph": lambda: load_graph(archive),
        "bytes": lambda: archive,
        "path": lambda: path,
        "text": lambda: str(path),
        "exported": exported,
    }[form]()
    plan = make_plan(graph, 2)
    assert plan.costs == make_plan(load_graph(archive), make_mesh((2,))).costs
    assert check_plan(plan, graph) == ()


@pytest.mark.parametrize("mesh", ["2x2", (2, 2), [2, 2], make_mesh((2, 2)), "axis0=2,axis1=2"])
def test_a_mesh_may_be_given_in_several_forms(mesh: MeshLike) -> None:
    assert to_mesh(mesh) == make_mesh((2, 2))


@pytest.fixture
def device_mesh() -> DeviceMesh:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.distributed.destroy_process_group()


def test_a_device_mesh_says_shape_names_and_devices(device_mesh: DeviceMesh) -> None:
    expected = make_mesh((2, 2), axes=("dp", "tp"), topology="cpu-100gbe")
    assert to_mesh(device_mesh) == expected
    assert to_mesh(device_mesh, topology="h100").topology.name == "h100-sxm"


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA L40S", "l40s-pcie"),
        ("NVIDIA B200", "b200-sxm"),
        ("NVIDIA GB200", "gb200-nvl72"),
        ("AMD Instinct MI300X", "mi300x-oam"),
        ("Tesla T4", None),
    ],
)
def test_the_preset_of_a_device_is_found_by_its_name(name: str, preset: str | None) -> None:
    assert preset_of_device(name) == preset


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda _: make_plan(MODEL, 2), ArgumentTypeError, r"export_model\(.*auto_parallelize\("),
        (lambda _: make_plan(None, 2), ArgumentTypeError, "path of a .pt2 file"),
        (lambda g: make_plan(g, None), ArgumentTypeError, "pass a Mesh of make_mesh"),
        (lambda g: make_plan(g, (2, "x")), ArgumentTypeError, "pass a Mesh of make_mesh"),
        (lambda g: make_plan(g, "two"), MeshError, "is not a mesh"),
        (lambda g: make_plan(g, 2, {"seed": 1}), ArgumentTypeError, "PlanOptions"),
        (lambda g: make_plan(g, 2, memory=1), OptionError, "give one of memory_budget"),
        (lambda g: make_plan(g, 2, memory_budget="a lot"), OptionError, "memory_budget"),
        (lambda g: check_plan(make_plan(g, 2), 3), ArgumentTypeError, "in place of a graph"),
        (lambda _: autoshard.search_meshes(MODEL, 2), ArgumentTypeError, "in place of a graph"),
        (lambda _: autoshard.make_plans({"a": (MODEL, None)}, 2), ArgumentTypeError, "module"),
        (lambda _: autoshard.parallelize(MODEL, "plan.json", None), ArgumentTypeError, "Plan.load"),
        (
            lambda g: Client.local(cache=False).plan(load_graph(g), mesh=2),
            ArgumentTypeError,
            "file",
        ),
        (lambda g: Client.local(cache=False).plan(g, mesh=None), ArgumentTypeError, "make_mesh"),
    ],
)
def test_anything_else_is_an_error_that_says_what_to_pass(
    call: Callable[[object], object], error: type[AutoshardError], message: str, archive: bytes
) -> None:
    with pytest.raises(error, match=message):
        call(archive)


def test_single_options_replace_those_of_the_object(archive: bytes) -> None:
    options = PlanOptions(seed=3, memory_budget="1GB")
    plan = make_plan(archive, 2, options, memory_budget="2GB")
    assert plan.options == PlanOptions(seed=3, memory_budget=2 * 10**9)
    with Client.local(cache=False) as client:
        made = client.plan(archive, mesh="axis0=2", options=options, memory_budget="2GB")
    assert made.costs == plan.costs
    assert made.mesh == plan.mesh


def test_a_program_of_torch_is_planned_as_it_was_exported() -> None:
    buffer = BytesIO()
    torch.export.save(exported(), buffer)
    assert make_plan(exported(), 2).graph == make_plan(buffer.getvalue(), 2).graph
