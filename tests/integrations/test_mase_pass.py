"""MASE's pass, planned by this library: its arguments, its results, its metadata and its file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dill
import pytest
import torch
from support.models import gpt2, mlp
from torch import fx, nn
from torch.distributed.tensor import Replicate, Shard

from autoshard.checker import check_plan
from autoshard.errors import InputError, OptionError, PlanError
from autoshard.integrations.mase import autosharding_analysis_pass
from autoshard.plan import PlanOptions

LINKS: dict[str, Any] = {
    "mesh_shape": (2, 4),
    "inter_node_bandwidth": 10e9,
    "intra_node_bandwidth": 100e9,
}


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """Arguments of the pass, with a file of their own."""
    return {**LINKS, "ilp_solution_file": str(tmp_path / "ilp_solution.pkl")}


@dataclass
class Traced:
    """A graph with what MASE's graph has: a module of torch.fx, and metadata of each node."""

    model: fx.GraphModule

    @property
    def fx_graph(self) -> fx.Graph:
        return self.model.graph


def traced(*, has_shapes: bool = True) -> Traced:
    """An MLP as `add_common_metadata_analysis_pass` leaves it."""
    graph = Traced(fx.symbolic_trace(mlp()[0]))
    for node in graph.fx_graph.nodes:
        args: dict[str, Any] = {}
        if node.op in ("call_module", "call_function"):
            args["data_in_0"] = {"shape": [16, 64]}
        if node.op == "call_module" and isinstance(
            graph.model.get_submodule(node.target), nn.Linear
        ):
            args |= {"weight": {}, "bias": {}}
        found = {"shape": [16, 64], "torch_dtype": torch.float32} if has_shapes else {}
        node.meta["mase"] = {"common": {"args": args, "results": {"data_out_0": found}}}
    return graph


def test_a_module_is_planned_with_the_results_of_the_pass(given: dict[str, Any]) -> None:
    model, inputs = gpt2()
    same, outputs = autosharding_analysis_pass(model, {**given, "dummy_in": inputs})
    assert same is model
    assert set(outputs) == {"autosharding_time", "tensor_sharding_map", "solution", "plan"}
    plan = outputs["plan"]
    assert check_plan(plan) == ()
    assert outputs["solution"] == plan.certificate.objective
    assert outputs["autosharding_time"] > 0
    layer = model.get_submodule("transformer.h.1.mlp.c_fc")
    entry = outputs["tensor_sharding_map"][layer]
    assert set(entry["sharding"]) == {"weight", "bias"}
    assert len(entry["sharding"]["weight"].placements) == 2


def test_the_arguments_become_those_of_the_plan(given: dict[str, Any]) -> None:
    limits = {"mip_rel_gap": 5, "time_limit": 30, "communications_backend": "gloo"}
    asked = {**given, **limits, "skip_fully_replicated": True, "run_checks": True, "algo": "alpa"}
    _, outputs = autosharding_analysis_pass(traced(), asked)
    plan = outputs["plan"]
    assert plan.options.solver.relative_gap == 0.05
    assert plan.options.solver.time_limit == 30
    assert plan.options.constraints.algo == "optimal"
    assert plan.options.constraints.skip_fully_replicated is True
    assert plan.options.mode == "inference"
    assert plan.mesh.axis_sizes == (2, 4)
    assert plan.mesh.topology.backend == "gloo"
    inner, outer = plan.mesh.topology.levels
    assert (inner.bandwidth, outer.bandwidth) == (100e9, 10e9)


def test_megatron_is_an_algorithm_too(given: dict[str, Any]) -> None:
    options = PlanOptions(mode="training")
    asked = {**given, "algo": "megatron", "options": options, "skip_forward": True}
    _, outputs = autosharding_analysis_pass(traced(), asked)
    assert outputs["plan"].options.constraints.algo == "megatron"
    assert outputs["plan"].options.mode == "training"
    assert "tensor_sharding_map" not in outputs


def test_the_metadata_of_nodes_get_placements(given: dict[str, Any]) -> None:
    graph, outputs = autosharding_analysis_pass(traced(), {**given, "skip_fully_replicated": True})
    nodes = {node.name: node.meta["mase"]["common"] for node in graph.fx_graph.nodes}
    plan = outputs["plan"]
    for name in ("up", "down"):
        for attribute in ("weight", "bias"):
            spec = nodes[name]["args"][attribute]["dtensor_spec"]
            placed = outputs["tensor_sharding_map"][graph.model.get_submodule(name)]
            assert (
                placed["sharding"][attribute].placements == plan.placements[f"{name}.{attribute}"]
            )
            assert len(spec.placements) == 2
        assert nodes[name]["args"]["data_in_0"]["dtensor_spec"].placements
        assert nodes[name]["results"]["data_out_0"]["dtensor_spec"].placements
    x = next(i for i in plan.stages[0].inputs if i.kind == "user")
    assert tuple(map(repr, nodes["x"]["results"]["data_out_0"]["dtensor_spec"].placements)) == (
        x.placements
    )


def test_the_file_has_the_arguments_of_operators(given: dict[str, Any]) -> None:
    _, outputs = autosharding_analysis_pass(traced(), given)
    with Path(given["ilp_solution_file"]).open("rb") as file:
        document = dill.load(file)  # noqa: S301  written above
    for name in ("linear", "linear_1", "up", "down"):
        assert set(document[name]["args"]) == {"data_in_0", "weight", "bias"}
        assert set(document[name]["results"]) == {"data_out_0"}
        for placements in (*document[name]["args"].values(), *document[name]["results"].values()):
            assert len(placements) == 2
    assert set(document["relu"]["args"]) == {"data_in_0"}
    assert document["up_weight"]["results"]["data_out_0"]
    assert outputs["plan"].found


def test_a_solution_is_preloaded_only_if_it_is_trusted(given: dict[str, Any]) -> None:
    """Later layers that the solution lacks are placed like the first one."""
    names = dict(gpt2(layers=3)[0].named_parameters(remove_duplicate=False))
    first = {
        name.replace(".", "_"): {"args": {}, "results": {"data_out_0": (Replicate(), Replicate())}}
        for name in names
        if ".h.1." not in name and ".h.2." not in name
    }
    first["transformer_h_0_mlp_c_fc_weight"]["results"]["data_out_0"] = (Replicate(), Shard(1))
    with Path(given["ilp_solution_file"]).open("wb") as file:
        dill.dump(first, file)
    asked = {**given, "preload_solution": True}
    model = gpt2(layers=3)[0]
    with pytest.raises(OptionError, match="trust_pickle=True"):
        autosharding_analysis_pass(model, asked)
    _, outputs = autosharding_analysis_pass(model, {**asked, "trust_pickle": True})
    assert outputs["autosharding_time"] == 0
    assert "plan" not in outputs
    placed = outputs["tensor_sharding_map"][model.get_submodule("transformer.h.2.mlp.c_fc")]
    assert placed["sharding"]["weight"].placements == (Replicate(), Shard(1))
    with pytest.raises(PlanError, match="the solution has no weight 'up_weight'"):
        autosharding_analysis_pass(mlp()[0], {**asked, "trust_pickle": True})


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"algo": "beam"}, "algo is 'beam'; give one of alpa, megatron"),
    ({"communications_backend": "mpi"}, "give one of default, nccl, gloo"),
    ({"time_limits": 3}, "no argument 'time_limits'; did you mean 'time_limit'"),
    ({"mip_rel_gap": 200}, "relative_gap"),
    ({"mesh_shape": (2, 0)}, "axis"),
    ({"options": PlanOptions(memory_budget=1)}, "there is no plan: "),
)


@pytest.mark.parametrize(("wrong", "text"), WRONG)
def test_wrong_arguments_are_named(given: dict[str, Any], wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text) as error:
        autosharding_analysis_pass(traced(), {**given, **wrong})
    assert isinstance(error.value, ValueError)  # as MASE raises for an algorithm


def test_what_is_missing_is_named(given: dict[str, Any]) -> None:
    for name in LINKS:
        some = {key: value for key, value in given.items() if key != name}
        with pytest.raises(OptionError, match=f"needs '{name}'"):
            autosharding_analysis_pass(traced(), some)
    with pytest.raises(OptionError, match="pass example arguments as dummy_in"):
        autosharding_analysis_pass(mlp()[0], given)
    with pytest.raises(OptionError, match="input 'x' has no shape in its metadata"):
        autosharding_analysis_pass(traced(has_shapes=False), given)
    with pytest.raises(OptionError, match="it was given a int"):
        autosharding_analysis_pass(3, given)
