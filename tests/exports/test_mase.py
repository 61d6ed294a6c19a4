"""Solutions of MASE, as its own `_export_solution` writes them: dill, placements by node."""

import os
import pickle
from pathlib import Path
from typing import Any

import dill
import pytest
from support.meshes import slow_devices
from support.models import gpt2, small_graph
from torch.distributed.tensor import Partial, Replicate, Shard

from autoshard.errors import OptionError, PlanError
from autoshard.exports.mase import (
    extrapolated,
    pins_of_solution,
    read_solution,
    sharding_map,
    solution_of_map,
    solution_of_plan,
    write_solution,
)
from autoshard.plan import Pins, Plan, PlanOptions
from autoshard.planner import make_plan

SIZES = (2, 2)
FIRST_LAYER = {
    "input_ids": {"args": {}, "results": {"data_out_0": (Shard(0), Replicate())}},
    "transformer_h_0_attn_c_proj_weight": {
        "args": {},
        "results": {"data_out_0": (Replicate(), Shard(0))},
    },
    "transformer_h_0_mlp_c_fc_weight": {
        "args": {},
        "results": {"data_out_0": (Replicate(), Shard(1))},
    },
    "addmm": {
        "args": {"data_in_0": (Shard(0), Shard(1)), "weight": (Replicate(), Shard(0))},
        "results": {"data_out_0": (Shard(0), Partial())},
    },
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ilp_solution.pkl"
    with path.open("wb") as stream:
        dill.dump(FIRST_LAYER, stream)
    return path


def planned(**options: Any) -> Plan:
    plan = make_plan(small_graph(gpt2), slow_devices(dp=2, tp=2), PlanOptions(**options))
    assert plan.found, plan.reason
    return plan


def test_a_solution_that_dill_wrote_is_read(file: Path) -> None:
    solution = read_solution(file, trust_pickle=True)
    assert list(solution) == list(FIRST_LAYER)
    assert solution["addmm"].args["weight"] == ("Replicate()", "Shard(dim=0)")
    assert solution["addmm"].results["data_out_0"] == ("Shard(dim=0)", "Partial(sum)")


def test_plans_follow_a_solution_in_every_layer(file: Path) -> None:
    graph = small_graph(gpt2)
    pins = pins_of_solution(read_solution(file, trust_pickle=True), graph, SIZES)
    assert pins == Pins(
        inputs={"input_ids": "S(0),I"},
        parameters={
            f"transformer.h.{layer}.{name}.weight": layout
            for layer in (0, 1)
            for name, layout in (("attn.c_proj", "I,S(0)"), ("mlp.c_fc", "I,S(1)"))
        },
    )
    plan = planned(pins=pins)
    layouts = {i.target: i.layout for i in plan.stages[0].inputs}
    assert layouts["transformer.h.1.mlp.c_fc.weight"] == "I,S(1)"
    assert layouts["input_ids"] == "S(0),R"


def test_without_extrapolation_later_layers_are_free(file: Path) -> None:
    solution = read_solution(file, trust_pickle=True)
    pins = pins_of_solution(solution, small_graph(gpt2), SIZES, extrapolate=False)
    assert {name.split(".")[2] for name in pins.parameters} == {"0"}


def test_only_the_first_number_of_a_name_is_the_layer(file: Path) -> None:
    solution = read_solution(file, trust_pickle=True)
    solution["transformer_h_0_experts_2_weight"] = solution["addmm"]
    names = ["transformer_h_7_experts_2_weight", "transformer_h_7_experts_3_weight"]
    found = extrapolated(solution, names)
    assert found[names[0]] == solution["addmm"]
    assert names[1] not in found


def test_a_plan_survives_its_solution(tmp_path: Path) -> None:
    plan, path = planned(), tmp_path / "ilp_solution.pkl"
    write_solution(solution_of_plan(plan), path, SIZES)
    with path.open("rb") as stream:
        document = dill.load(stream)  # noqa: S301  written above
    assert document["transformer_wpe_weight"]["results"]["data_out_0"]
    assert read_solution(path, trust_pickle=True) == solution_of_plan(plan)


def test_a_plan_survives_the_sharding_map() -> None:
    plan, (model, _) = planned(), gpt2()
    placed = sharding_map(plan, model)
    block = model.get_submodule("transformer.h.1.mlp.c_fc")
    assert set(placed[block]["sharding"]) == {"weight", "bias"}
    assert placed[block]["node"].startswith("transformer_h_1_mlp_c_fc_")
    expected = solution_of_plan(plan)
    found = solution_of_map(placed, model)
    assert found == {name: expected[name] for name in found}
    assert len(found) == len(list(model.named_parameters(remove_duplicate=False)))


def test_a_pickle_is_only_read_on_request(file: Path) -> None:
    with pytest.raises(OptionError, match="--trust-pickle"):
        read_solution(file, trust_pickle=False)


class Harmful:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


@pytest.mark.parametrize("module", [pickle, dill])
def test_a_pickle_that_runs_something_is_refused(tmp_path: Path, module: Any) -> None:
    path, trace = tmp_path / "ilp_solution.pkl", tmp_path / "trace"
    path.write_bytes(module.dumps({"a": Harmful(f"touch {trace}")}))
    with pytest.raises(PlanError, match="system, which is not allowed in a solution"):
        read_solution(path, trust_pickle=True)
    assert not trace.exists()


@pytest.mark.parametrize(
    "content", [b"", b"not a pickle", dill.dumps([1]), dill.dumps({"a": {"args": {"x": 3}}})]
)
def test_what_is_no_solution_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ilp_solution.pkl"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"ilp_solution\.pkl is not"):
        read_solution(path, trust_pickle=True)


def test_a_solution_of_another_model_or_mesh_is_named(file: Path) -> None:
    solution, graph = read_solution(file, trust_pickle=True), small_graph(gpt2)
    with pytest.raises(PlanError, match="on 2 axes, but the mesh has 3"):
        pins_of_solution(solution, graph, (2, 2, 2))
    with pytest.raises(PlanError, match="none is a weight or an input"):
        pins_of_solution({"addmm": solution["addmm"]}, graph, SIZES)
    other, _ = gpt2(layers=1)
    with pytest.raises(PlanError, match=r"no parameter 'transformer\.h\.1"):
        sharding_map(planned(), other)
