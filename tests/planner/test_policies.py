"""Cuts into pipeline stages from options: by name, by layers, by marks in forward, by balance."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations

import numpy as np
import pytest
import torch
from support.models import bert, gpt2, llama, residuals, small_graph
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipe_split
from torch.distributed.pipelining._IR import annotate_split_points

from autoshard import PlanOptions, make_mesh, make_plan
from autoshard.errors import OptionError, SchemaError
from autoshard.graph import (
    Graph,
    InputKind,
    StageCutter,
    export_model,
    graph_from_json,
    graph_to_json,
    load_graph,
)
from autoshard.planner.pipeline.balance import balanced_cuts, node_weights
from autoshard.planner.pipeline.named_cuts import cut_names, marked_cuts
from autoshard.planner.pipeline.policies import cuts_of, num_stages, required_cuts, stage_cutter

ONE_DEVICE = make_mesh((1,))


@cache
def cutter_of(build: Callable[[], object]) -> StageCutter:
    return stage_cutter(small_graph(build))


def cuts(cutter: StageCutter, **options: object) -> tuple[int, ...] | None:
    return cuts_of(PlanOptions(**options), cutter, ONE_DEVICE)


def modules(cutter: StageCutter, found: Sequence[int] | None) -> list[str]:
    assert found is not None
    return [cutter.graph.nodes[i].module for i in found]


def stage_weights(weights: Sequence[float], found: Sequence[int]) -> list[float]:
    return [float(sum(part)) for part in np.split(np.asarray(weights), found)]


@pytest.mark.parametrize("build", [gpt2, bert, llama, residuals])
@pytest.mark.parametrize("stages", [2, 3])
def test_balanced_cuts_are_the_best_of_all(build: Callable[[], object], stages: int) -> None:
    cutter = cutter_of(build)
    rng = random.Random(stages)
    points = cutter.cut_points if stages == 2 else cutter.cut_points[::3]
    nbytes = {point.node: point.nbytes for point in cutter.cut_points}
    placed = set(cutter.placed)
    for trial in range(3):
        weights = [
            float(rng.choice((0, 1, 1, 5, 40))) if i in placed else 0.0
            for i in range(len(cutter.graph.nodes))
        ]
        required = [] if trial < 2 else [rng.choice(points).node]

        def price(found: Sequence[int], w: list[float] = weights) -> tuple[float, float, float]:
            sizes = stage_weights(w, found)
            return max(sizes), sum(nbytes[i] for i in found), sum(x * x for x in sizes)

        found = balanced_cuts(cutter, stages, weights, required=required)
        assert set(required) <= set(found)
        tried = combinations([point.node for point in points], stages - 1)
        best = min(price(each) for each in tried if set(required) <= set(each))
        assert price(found) <= best
        assert len(cutter.split(found)) == stages


def test_every_number_of_stages_up_to_that_of_the_cut_points_is_met() -> None:
    cutter = cutter_of(gpt2)
    most = len(cutter.cut_points) + 1
    for stages in (*range(1, 9), most - 1, most):
        for weight in ("parameters", "time"):
            found = cuts(cutter, stages=stages, balance=weight)
            assert found is not None
            assert len(cutter.split(found)) == stages
    with pytest.raises(OptionError, match=f"at most {most} stages"):
        cuts(cutter, stages=most + 1, balance="parameters")


def test_a_tied_parameter_counts_once_in_the_first_stage_that_uses_it() -> None:
    cutter = cutter_of(gpt2)
    graph = cutter.graph
    numbers = node_weights(cutter, "parameters", ONE_DEVICE, PlanOptions())
    assert numbers.sum() == sum(graph.values[i.name].numel for i in graph.parameters)
    (tied,) = [i for i in graph.parameters if i.aliases]
    first = graph.consumers[tied.name][0][0]
    assert numbers[first] == graph.values[tied.name].numel
    nbytes = node_weights(cutter, "bytes", ONE_DEVICE, PlanOptions())
    assert nbytes.sum() >= 4 * numbers.sum()
    flops = node_weights(cutter, "flops", ONE_DEVICE, PlanOptions())
    head = next(i for i in reversed(cutter.placed) if tied.name in graph.nodes[i].inputs)
    rows, features = graph.values[graph.nodes[head].inputs[0]].shape[-2:]
    assert flops[head] % (2 * rows * features * graph.values[tied.name].shape[0]) == 0


def test_time_counts_backward_in_training_only() -> None:
    cutter = cutter_of(llama)
    training = node_weights(cutter, "time", ONE_DEVICE, PlanOptions())
    inference = node_weights(cutter, "time", ONE_DEVICE, PlanOptions(mode="inference"))
    assert 0 < inference.sum() < training.sum()


def test_layers_are_numbered_modules() -> None:
    cutter = cutter_of(gpt2)
    found = cuts(cutter, balance=(1, 1))
    assert modules(cutter, found) == ["transformer.h.1.ln_1"]
    assert num_stages(PlanOptions(balance=(1, 1)), cutter) == 2
    with pytest.raises(OptionError, match="sums to 3, but the program has 2 layers"):
        cuts(cutter, balance=(2, 1))
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        PlanOptions(balance=(2, 0))


def sequential(*layers: nn.Module) -> StageCutter:
    model = nn.Sequential(*layers).eval()
    return stage_cutter(load_graph(export_model(model, (torch.randn(2, 4),))))


def test_layers_without_operators_count_too() -> None:
    shared = nn.Linear(4, 4)
    cutter = sequential(shared, nn.Dropout(), nn.ReLU(), shared, nn.Identity(), nn.Linear(4, 4))
    assert modules(cutter, cuts(cutter, balance=(1, 2, 3))) == ["2", "3"]
    assert modules(cutter, cuts(cutter, balance=(4, 2))) == ["5"]
    with pytest.raises(OptionError, match="would have no operator"):
        cuts(cutter, balance=(1, 1, 4))


class Unnumbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.weights = nn.ParameterList(torch.randn(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for weight in self.weights:
            x = (x @ weight).sigmoid().tanh() * 2 + 1
        return x


def test_repeated_blocks_are_layers_where_no_module_is_numbered() -> None:
    cutter = stage_cutter(load_graph(export_model(Unnumbered(), (torch.randn(2, 4),))))
    found = cuts(cutter, balance=(1, 3))
    assert found is not None
    first, second = cutter.split(found)
    assert [len(part.parameters) for part in (first, second)] == [3, 3]


def test_cuts_before_and_after_named_modules() -> None:
    cutter = cutter_of(gpt2)
    assert modules(cutter, cuts(cutter, cuts=("before:transformer.h.1.mlp",))) == [
        "transformer.h.1.mlp.c_fc"
    ]
    assert cuts(cutter, cuts=("after:transformer.h.0",)) == cuts(
        cutter, cuts=("before:transformer.h.1",)
    )
    every = cuts(cutter, cuts=("before:transformer.h.*", "after:transformer.h.*"))
    assert modules(cutter, every) == [
        "transformer.h.0.ln_1",
        "transformer.h.1.ln_1",
        "transformer.ln_f",
    ]
    assert modules(cutter, cuts(cutter, cuts=("before:*",))) == ["lm_head"]
    with pytest.raises(OptionError, match="no operator after it"):
        cuts(sequential(nn.Linear(4, 4)), cuts=("after:0",))


def test_a_function_of_the_graph_chooses_the_cuts() -> None:
    def policy(graph: Graph) -> list[int]:
        products = [i for i, node in enumerate(graph.nodes) if "addmm" in node.operator]
        return products[1:3]

    cutter = cutter_of(gpt2)
    options = PlanOptions(cuts=cut_names(cutter.graph, policy(cutter.graph)))
    same = PlanOptions.model_validate_json(options.model_dump_json())
    assert num_stages(same, cutter) == 3
    assert cuts_of(same, cutter, ONE_DEVICE) == tuple(policy(cutter.graph))
    with pytest.raises(OptionError, match="not the index of a node"):
        cut_names(cutter.graph, [0])


def test_further_cuts_are_added_to_those_that_are_named() -> None:
    cutter = cutter_of(llama)
    named = cuts(cutter, cuts=("after:model.embed_tokens",))
    assert named is not None
    found = cuts(cutter, cuts=("after:model.embed_tokens",), stages=4, balance="time")
    assert found is not None
    assert set(named) < set(found)
    assert len(found) == 3
    assert cuts(cutter, cuts=("after:model.embed_tokens",), stages=4) is None
    assert required_cuts(PlanOptions(stages="auto"), cutter) == ()
    assert num_stages(PlanOptions(stages="auto"), cutter) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cuts": ("before:transformer.h.2",)}, "similar names: transformer.h.1"),
        ({"cuts": ("before:transformer.wte",)}, "no operator before it"),
        ({"cuts": ("at:lm_head",)}, "no such operator"),
        ({"cuts": ("at:embedding",)}, "leaves a stage without operators"),
        ({"stages": 1, "cuts": ("before:transformer.h.1",)}, "make 2 stages"),
        ({"stages": 3, "balance": (1, 1)}, "lists 2 stages"),
        ({"balance": "time"}, "needs a number of stages"),
        ({"balance": "bytes", "stages": "auto"}, "needs a number of stages"),
        ({"balance": (1, 1), "cuts": ("before:transformer.ln_f",)}, "leave out one of them"),
    ],
)
def test_options_that_contradict_the_program(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        cuts(cutter_of(gpt2), **options)


class Marked(nn.Module):
    """Calls of pipe_split() in forward, inside no_grad, and around its first and last operator."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        pipe_split()
        x = self.first(x)
        pipe_split()
        pipe_split()
        with torch.no_grad():
            shift = x * 2
            pipe_split()
            shift = shift + 1
        x = self.norm(self.second(x) + shift)
        loss = nn.functional.cross_entropy(x, labels)
        pipe_split()
        return loss


def marked(**points: SplitPoint) -> StageCutter:
    model = Marked()
    annotate_split_points(model, points)
    inputs = (torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
    return stage_cutter(load_graph(export_model(model, inputs)))


def test_calls_of_pipe_split_become_cuts() -> None:
    cutter = marked()
    found = cuts(cutter)
    assert found == marked_cuts(cutter)
    parts = cutter.split(found or ())
    operators = [{node.operator for node in part.nodes} for part in parts]
    assert len(parts) == 3
    assert operators[0] == {"aten.linear.default"}
    assert operators[1] == {"aten.detach.default", "aten.mul.Tensor"}
    assert "aten.batch_norm.default" in operators[2]
    assert cuts(cutter, stages=1) == ()
    with pytest.raises(OptionError, match="3 stages do not divide the 2 devices"):
        make_plan(cutter.graph, make_mesh((2,)), PlanOptions(micro_batches=2))
    assert len(make_plan(cutter.graph, make_mesh((2,)), PlanOptions(stages=1)).stages) == 1
    with pytest.raises(OptionError, match=r"pipe_split\(\) in forward make 3 stages"):
        cuts(cutter, stages=2)


def test_annotated_split_points_become_cuts() -> None:
    cutter = marked(first=SplitPoint.BEGINNING, second=SplitPoint.END, norm=SplitPoint.BEGINNING)
    found = cuts(cutter)
    assert found is not None
    parts = cutter.split(found)
    assert [len(part.parameters) for part in parts] == [2, 0, 2, 0, 2]


def test_a_program_without_placed_nodes_has_one_stage() -> None:
    class Constant(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    cutter = stage_cutter(load_graph(export_model(Constant(), (torch.randn(2),))))
    assert cuts(cutter) == ()
    with pytest.raises(OptionError, match="at most 1 stages"):
        cuts(cutter, stages=2)
    with pytest.raises(OptionError, match="numbered modules"):
        cuts(cutter, balance=(1, 1))


@pytest.mark.parametrize("options", [{"batch_axis": "dp"}, {"algo": "megatron"}])
def test_options_about_the_batch_hold_in_each_stage(options: dict[str, object]) -> None:
    mesh = make_mesh((2, 2, 2), axes=("pp", "dp", "tp"))
    cut = {"cuts": ("before:model.layers.1",), "micro_batches": 4, **options}
    plan = make_plan(small_graph(llama), mesh, PlanOptions(**cut))
    assert plan.found, plan.reason
    assert len(plan.stages) == 2
    second = graph_from_json(plan.stages[1].program)
    assert [i for i in second.inputs if i.kind is InputKind.RECEIVED]
    for stage in plan.stages:
        given = [i for i in stage.inputs if i.kind in {"user", "received"}]
        assert all(i.layout.startswith("S(0),") for i in given)
        assert any("S(0)" in layout for node in stage.nodes for layout in node.outputs)


def test_dims_of_received_tensors_are_checked() -> None:
    graph = small_graph(gpt2)
    cutter = stage_cutter(graph, PlanOptions(batch_axis="dp"))
    document = graph_to_json(cutter.split([cutter.cut_points[9].node])[1])
    assert graph_to_json(graph_from_json(document)) == document
    received = next(i for i in document["inputs"] if i["kind"] == "received")
    for wrong in (
        [[[7, "batch"]]],
        [[[-4, "batch"], [-1, "model"]], [[8, "input"]], [[32, "model"]]],
    ):
        received["dims"] = wrong
        with pytest.raises(SchemaError, match="factors of dims of another tensor"):
            graph_from_json(document)
    received["dims"] = [[[4, "unknown"]]]
    with pytest.raises(SchemaError, match="batch"):
        graph_from_json(document)
