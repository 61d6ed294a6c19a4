"""Fitting and sizing: the figures are those of plans, limits are those of brute force."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import autoshard
from support.configs import write_config

from autoshard.errors import OptionError
from autoshard.exports import read_like
from autoshard.graph import Graph, load_graph
from autoshard.mesh import make_mesh
from autoshard.plan import Plan
from autoshard.planner import make_plan
from autoshard.requests.model_configs import BatchShape
from autoshard.requests.model_files import export_named
from autoshard.sizing import find_largest, fit_model, size_model
from autoshard.sizing.models import ResizableModel, Sizes

TOPOLOGY = "h100-sxm"
SEQUENCE = 32


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_config(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def graph(config: str) -> Graph:
    """The graph of the config, whose batch size is dynamic."""
    shape = BatchShape(batch_size=8, seq_length=SEQUENCE)
    return load_graph(export_named(config, shape, any_batch_size=True))


def priced(graph: Graph, layout: str, gpus: int = 4, **options: Any) -> Plan:
    """The plan of a layout, as the planner makes it."""
    found = read_like(layout, num_ranks=gpus)
    names, sizes = zip(*found.axes, strict=True)
    mesh = make_mesh(sizes, axes=names, topology=TOPOLOGY)
    given = {**found.options.given, **options, "comparisons": False}
    return make_plan(graph, mesh, **given)


@pytest.mark.parametrize("layout", ["fsdp2", "hsdp shard=2", "ddp", "megatron tp=2 zero1"])
def test_the_figures_are_those_of_the_plan(graph: Graph, layout: str) -> None:
    (row,) = fit_model(graph, 4, topology=TOPOLOGY, layout=layout).rows
    plan = priced(graph, layout)
    assert plan.memory is not None
    assert plan.costs is not None
    assert row.verdict == "fits"
    assert (row.peak, row.step_time) == (plan.memory.peak, plan.costs.total)
    assert row.kinds == {kind: getattr(plan.memory, kind) for kind in row.kinds}
    assert row.held is not None
    assert sum(row.held.parts.values()) == row.peak


def test_rows_are_the_plans_of_their_options(graph: Graph) -> None:
    vary = {"reshard-after-forward": ["always", "never"], "recomputation": ["never", "always"]}
    found = fit_model(graph, 4, topology=TOPOLOGY, layout="fsdp2", vary=vary)
    for row in found.rows:
        reshard, again = row.varied.values()
        plan = priced(graph, "fsdp2", reshard_after_forward=reshard, activation_checkpointing=again)
        assert plan.memory is not None
        assert row.peak == plan.memory.peak
        assert row.num_recomputed == len(plan.stages[0].checkpoints)
    assert len({row.peak for row in found.rows}) == 4


def test_an_optimizer_on_the_host_takes_none_of_the_device(graph: Graph) -> None:
    vary = {"offload": ["none", "optimizer"]}
    here, there = fit_model(graph, 4, topology=TOPOLOGY, layout="fsdp2", vary=vary).rows
    assert there.host_memory == here.kinds["optimizer"] > 0
    assert there.kinds["optimizer"] == 0
    assert here.peak is not None
    assert there.peak == here.peak - there.host_memory


def test_the_usual_layouts_are_compared_and_none_goes_below_the_bound(graph: Graph) -> None:
    found = fit_model(graph, 4, topology=TOPOLOGY)
    assert [row.layout for row in found.rows] == ["fsdp2", "megatron tp=4 sp zero1", "zero1", "ddp"]
    peaks = [row.peak for row in found.rows if row.peak is not None]
    assert len(peaks) >= 3
    assert all(peak >= found.least for peak in peaks)
    assert found.verdict == "fits"


def test_what_does_not_fit_says_what_it_needs_at_least(graph: Graph) -> None:
    always = {"reshard_after_forward": "always", "activation_checkpointing": "always"}
    memory = priced(graph, "fsdp2", **always).memory
    assert memory is not None
    asked = {"topology": TOPOLOGY, "layout": "fsdp2"}
    found = fit_model(graph, 4, **asked, memory_budget=memory.peak - 1)
    (row,) = found.rows
    assert (row.verdict, row.peak, row.step_time) == ("does not fit", memory.peak, None)
    assert row.num_recomputed == 2
    assert found.verdict == "unknown"
    assert fit_model(graph, 4, **asked, memory_budget=memory.peak).verdict == "fits"
    assert fit_model(graph, 4, **asked, memory_budget=found.least - 1).verdict == "does not fit"


@pytest.mark.thorough
def test_the_largest_batch_is_that_of_brute_force(config: str, graph: Graph) -> None:
    at = ResizableModel(graph, "training")
    sizes = range(4, 29, 4)
    always = {"reshard_after_forward": "always", "activation_checkpointing": "always"}
    memory = priced(at.graph(Sizes(batch_size=16)), "fsdp2", **always).memory
    assert memory is not None
    budget = memory.peak + 1000
    fitting = [
        size
        for size in sizes
        if priced(at.graph(Sizes(batch_size=size)), "fsdp2", memory_budget=budget).found
    ]
    asked = {"topology": TOPOLOGY, "layout": "fsdp2", "memory_budget": budget}
    found = find_largest(graph, 4, "batch_size", **asked)
    assert (found.unit, found.size) == (4, max(fitting))
    assert fitting == list(range(4, max(fitting) + 1, 4))
    assert found.beyond is not None
    assert found.beyond.varied == {"batch_size": str(max(fitting) + 4)}
    assert found.beyond.peak is not None
    assert found.row.peak is not None
    assert found.row.peak <= budget < found.beyond.peak
    # The graph of another batch size is that of an export at this size.
    shape = BatchShape(batch_size=max(fitting), seq_length=SEQUENCE)
    exported = load_graph(export_named(config, shape))
    again = priced(exported, "fsdp2", memory_budget=budget).memory
    assert again is not None
    assert found.row.peak == again.peak


def test_the_longest_sequence_ends_at_the_positions_of_the_model(config: str) -> None:
    found = find_largest(config, 4, "seq_length", topology=TOPOLOGY, layout="fsdp2", batch_size=4)
    assert (found.size, found.beyond) == (128, None)
    assert "max_position_embeddings" in found.remark


def test_a_graph_with_one_batch_size_has_no_other(graph: Graph, config: str) -> None:
    fixed = load_graph(export_named(config, BatchShape(batch_size=4, seq_length=SEQUENCE)))
    with pytest.raises(OptionError, match="the graph was exported with 4"):
        fit_model(fixed, 4, layout="fsdp2", batch_size=8)
    with pytest.raises(OptionError, match="mixed_precision is part of an export"):
        fit_model(graph, 4, layout="fsdp2", mixed_precision="bfloat16")


def test_options_that_do_not_exist_are_named(graph: Graph) -> None:
    with pytest.raises(OptionError, match="did you mean 'reshard_after_forward'"):
        fit_model(graph, 4, layout="fsdp2", vary={"reshard-after-forwards": ["always"]})
    with pytest.raises(OptionError, match="there is no offload 'optimiser'"):
        fit_model(graph, 4, layout="fsdp2", vary={"offload": ["optimiser"]})


def test_the_fewest_devices_reach_the_throughput_and_fewer_do_not(graph: Graph) -> None:
    step = priced(graph, "fsdp2", 4).costs
    assert step is not None
    target = 8 * SEQUENCE / step.total * 0.999
    found = size_model(graph, tokens_per_second=target, topology=TOPOLOGY, price=2.0, max_gpus=8)
    assert found.fewest is not None
    for row in found.rows:
        assert row.step_time is not None
        assert row.tokens_per_second == pytest.approx(8 * SEQUENCE / row.step_time)
        assert row.reaches == (row.tokens_per_second >= target)
        assert row.price == pytest.approx(
            2.0 * row.num_devices * 1e9 / row.tokens_per_second / 3600
        )
    reaching = [row for row in found.rows if row.reaches]
    assert found.fewest == reaching[0].num_devices <= 4
    assert all(row.num_devices < found.fewest for row in found.rows if not row.reaches)
    cheapest = min(reaching, key=lambda row: row.price or 0.0)
    assert found.cheapest == cheapest.num_devices


def test_more_than_the_peak_rate_needs_more_devices(graph: Graph) -> None:
    found = size_model(graph, tokens=1e18, days=1, topology=TOPOLOGY, max_gpus=8)
    assert (found.rows, found.fewest) == ((), None)
    assert found.least_by_arithmetic > 8
    with pytest.raises(OptionError, match="give tokens_per_second, or tokens and days"):
        size_model(graph, tokens=1e12)


def test_the_command_says_what_plan_says(config: str, tmp_path: Path) -> None:
    batch = ("--batch-size", "8", "--seq-length", str(SEQUENCE), "--topology", TOPOLOGY, "-q")
    plan = tmp_path / "plan.json"
    made = autoshard(
        *("plan", config, "--gpus", "4", "--like", "fsdp2", "--no-comparisons", "-o", plan, *batch)
    )
    assert made.exit_code == 0, made.output
    memory = json.loads(plan.read_text())["memory"]
    shown = autoshard("fit", config, "--gpus", "4", "--layout", "fsdp2", *batch, "--json")
    assert shown.exit_code == 0, shown.output
    (row,) = json.loads(shown.stdout)["rows"]
    assert row["peak"] == memory["peak"]
    none = autoshard(
        *("fit", config, "--gpus", "4", "--layout", "fsdp2", "--memory", "100kB", *batch)
    )
    assert none.exit_code == 3
    assert "Does not fit with fsdp2" in none.output


def test_the_command_refuses_what_it_cannot_compare(config: str) -> None:
    both = autoshard("fit", config, "--gpus", "4", "--largest", "batch-size")
    assert both.exit_code == 1
    assert "--largest is of one configuration" in both.output
    vary = autoshard("fit", config, "--gpus", "4", "--vary", "gpus")
    assert "is not NAME=VALUE,VALUE" in vary.output
