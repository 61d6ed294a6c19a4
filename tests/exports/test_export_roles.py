"""The roles of axes in plans for a target, and layouts of Megatron-LM that come back."""

import tomllib

import pytest
from support.meshes import slow_devices
from support.models import graph_of, llama, meta, small_graph

from autoshard.checker import check_plan
from autoshard.errors import OptionError, PlanError
from autoshard.exports import export_plan, expressed_share, layout_of, read_like
from autoshard.exports.results import READ_BACK
from autoshard.mesh import make_mesh
from autoshard.plan import PlanOptions
from autoshard.planner import make_plan


@pytest.mark.parametrize(
    "layout",
    [
        "megatron tp=4 sp zero1",
        "megatron tp=2 sp fsdp",
        "megatron cp=2 zero1",
        "megatron cp=2 fsdp",
        "megatron tp=2 cp=2",
        "megatron",
    ],
)
def test_a_layout_of_megatron_comes_back_as_it_was(layout: str) -> None:
    found = read_like(layout, num_ranks=8)
    graph = graph_of(meta(llama, batch=8))
    plan = make_plan(graph, slow_devices(**dict(found.axes)), found.options)
    back = layout_of(READ_BACK["megatron"](export_plan(plan, "megatron")), 8)
    assert back.axes == found.axes
    for name in ("algo", "distributed_optimizer", "reshard_after_forward", "regather_activations"):
        assert back.options.value(name) == found.options.value(name), name
    again = make_plan(graph, slow_devices(**dict(back.axes)), back.options)
    assert (again.costs, again.memory) == (plan.costs, plan.memory)


@pytest.mark.parametrize(("target", "axes"), [("torchtitan", (2, 2)), ("fsdp2", (2, 2))])
def test_no_plan_that_is_exported_whole_is_faster_than_those_made_for_it(
    target: str, axes: tuple[int, ...]
) -> None:
    graph, mesh = small_graph(llama), make_mesh(axes)
    made = make_plan(graph, mesh, PlanOptions(exportable_to=target))
    assert made.found, made.reason
    assert not check_plan(made, graph)
    whole = []
    for algo in ("ddp", "fsdp2", "hsdp", "megatron", "megatron-sp", "optimal"):
        plan = make_plan(graph, mesh, PlanOptions(algo=algo))
        try:
            share = expressed_share(plan, target)
        except PlanError:
            continue
        if share is not None and share.share == 1:
            whole.append(algo)
            assert made.certificate.objective <= plan.certificate.objective * (1 + 1e-9), algo
    assert "hsdp" in whole


def test_axes_have_the_roles_that_are_asked_for() -> None:
    graph, mesh = small_graph(llama), make_mesh((2, 2))
    sharded = ("shard", "tensor")
    options = PlanOptions(exportable_to="torchtitan", export_roles=sharded)
    plan = make_plan(graph, mesh, options)
    settings = tomllib.loads(export_plan(plan, "torchtitan", min_expressed=1))["parallelism"]
    assert settings["tensor_parallel_degree"] == settings["data_parallel_shard_degree"] == 2
    free = make_plan(graph, mesh, options.with_values(export_roles=None))
    assert free.costs.total < plan.costs.total
    assert free.options.constraints.export_roles != sharded
    with pytest.raises(OptionError, match=r"tensor, shard are not possible .* possible are shard"):
        make_plan(graph, mesh, options.with_values(export_roles=("tensor", "shard")))
