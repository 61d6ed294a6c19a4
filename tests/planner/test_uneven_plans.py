"""Plans with uneven shards: valid, priced by the largest shard, and checked."""

from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from support.meshes import slow_devices
from support.models import Planner, graph_of, meta, mlp
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from autoshard.checker import check_plan
from autoshard.errors import OptionError
from autoshard.graph import Graph
from autoshard.mesh import make_mesh
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.pricing import simulate

VOCABULARY, WIDTH = 50257, 768
LARGEST = 6283
"""Rows of a vocabulary of 50257 on each of 8 ranks but the last, which has 6276."""
TIED = "lm_head.weight"
LOSS, LOOKUP = "cross_entropy_loss_cross_entropy_loss", "embedding"


def gpt2_small() -> tuple[nn.Module, dict[str, Any]]:
    """GPT-2 small with its real sizes."""
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ids = torch.zeros(8, 1024, dtype=torch.long)
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids, "use_cache": False}


@cache
def graph() -> Graph:
    return graph_of(meta(gpt2_small))


@cache
def on_8(*, pinned: bool) -> Plan:
    nodes = {LOSS: "S(1) R -> *", LOOKUP: "S(0) R -> P"}
    pins = {"nodes": nodes, "parameters": {TIED: "S(0)"}} if pinned else {}
    return make_plan(graph(), make_mesh((8,)), PlanOptions(pins=pins))


def test_a_vocabulary_is_cut_by_an_axis_that_does_not_divide_it() -> None:
    plan = on_8(pinned=True)
    assert plan.found
    assert check_plan(plan, graph()) == ()
    (stage,) = plan.stages
    (table,) = (p for p in stage.parameters if TIED in (p.target, *p.aliases))
    assert table.local_shape == (LARGEST, WIDTH)
    assert table.placements == ("Shard(dim=0)",)
    placed = {node.name: node for node in stage.nodes}
    assert placed[LOOKUP].inputs == ("S(0)", "R")
    positions = 8 * 1024 * 4
    assert [s.nbytes for s in placed[LOSS].inside] == [positions, 2 * positions]


def test_it_pays_without_being_asked_for() -> None:
    """Nobody pins it: the loss over a slice of the vocabulary is what is cheapest."""
    (stage,) = on_8(pinned=False).stages
    placed = {node.name: node for node in stage.nodes}
    assert placed[LOSS].inputs[0] == "S(1)"
    assert on_8(pinned=False).costs.total <= on_8(pinned=True).costs.total


def test_the_largest_share_is_priced_and_held() -> None:
    """A vocabulary of 8 x 6283, which the axis divides, takes as much of every rank."""
    config = GPT2Config(
        vocab_size=8 * LARGEST, n_layer=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    odd = GPT2Config(n_layer=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    pins = {"parameters": {TIED: "S(0)"}, "nodes": {LOSS: "S(1) R -> *", LOOKUP: "S(0) R -> P"}}
    made = []
    for each in (config, odd):
        ids = torch.zeros(8, 128, dtype=torch.long, device="meta")
        inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
        small = graph_of((meta(GPT2LMHeadModel, each), inputs))
        made.append(make_plan(small, make_mesh((8,)), PlanOptions(pins=pins)))
    even, uneven = made
    assert uneven.memory == even.memory
    assert uneven.costs.compute == pytest.approx(even.costs.compute, rel=1e-9)
    assert uneven.collectives == even.collectives


def test_what_is_gathered_is_as_long_as_the_slices_of_all() -> None:
    """Whole where it is used, cut at rest: 8 times the largest share moves."""
    pins = {"parameters": {TIED: "S(0)"}, "nodes": {LOOKUP: "R S(0) -> *", LOSS: "S(0) S(0) -> *"}}
    options = PlanOptions(pins=pins, forbid=[{"kind": "all_to_all"}])
    plan = make_plan(graph(), make_mesh((8,)), options)
    assert check_plan(plan, graph()) == ()
    (stage,) = plan.stages
    (table,) = (p for p in stage.parameters if TIED in (p.target, *p.aliases))
    found = [c for c in stage.reshardings if c.value == table.name]
    gathers = [s for c in found for s in c.steps if s.forward == "all_gather"]
    assert gathers
    assert {step.nbytes for step in gathers} == {8 * LARGEST * WIDTH * 4}
    # As many bytes as the tensor has are too few, and the checker says so.
    (first, *rest) = found[0].steps
    lesser = first.model_copy(update={"nbytes": VOCABULARY * WIDTH * 4})
    altered = found[0].model_copy(update={"steps": (lesser, *rest)})
    others = tuple(altered if c is found[0] else c for c in stage.reshardings)
    wrong = plan.model_copy(update={"stages": (stage.model_copy(update={"reshardings": others}),)})
    assert any(f"moves {8 * LARGEST * WIDTH * 4} bytes" in f for f in check_plan(wrong))


@pytest.mark.parametrize("axes", [{"a": 4}, {"a": 4, "b": 2}, {"a": 2, "b": 4}])
def test_a_batch_of_ten(axes: dict[str, int], planned: Planner) -> None:
    mesh = slow_devices(**axes)
    plan = planned(graph_of(meta(mlp, 10, 64, 128, 64)), mesh, batch_axis="a")
    (stage,) = plan.stages
    (x,) = (i for i in stage.inputs if i.kind == "user")
    assert x.placements[0] == "Shard(dim=0)"
    assert x.local_shape[0] == -(-10 // axes["a"])
    assert prod(stage.outputs[0].local_shape[:1]) == -(-10 // axes["a"])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "fewer rows than ranks": (
        {"pins": {"inputs": {"x": "S(0),R"}}},
        "size 3 does not divide into 4 shards, and shards of 1 leave nothing for the last rank",
    ),
    "an empty last rank": (
        {"pins": {"parameters": {"up.weight": "S(0),I"}}},
        "size 6 does not divide into 4 shards, and shards of 2 leave nothing for the last rank",
    ),
    "two axes": (
        {"pins": {"parameters": {"down.weight": "S(0),S(0)"}}},
        "size 10 does not divide into 8 shards, and unequal shards need a single axis on the dim",
    ),
    "chunks": (
        {"pins": {"parameters": {"down.weight": "S(0)/1+1,I"}}},
        r"size 10 does not divide into 4 shards of each of the sections 1\+1",
    ),
    "batch": (
        {"batch_axis": "a"},
        "the batch of 3, and shards of 1 leave nothing for the last rank",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_sharded_is_named(name: str) -> None:
    options, complaint = BAD[name]
    graph = graph_of(meta(mlp, 3, 8, 6, 10))
    with pytest.raises(OptionError, match=complaint):
        make_plan(graph, slow_devices(a=4, b=2), PlanOptions(**options))


def test_no_rank_gets_nothing(planned: Planner) -> None:
    """3 rows and 6 hidden features on 4 ranks are never cut by them."""
    plan = planned(graph_of(meta(mlp, 3, 8, 6, 8)), slow_devices(a=4))
    (stage,) = plan.stages
    for placed in stage.inputs:
        whole, local = placed.shape, placed.local_shape
        assert all(size == part for size, part in zip(whole, local, strict=True) if size in (3, 6))


def test_a_simulation_knows_the_copies_beside_an_uneven_gather(planned: Planner) -> None:
    given = graph_of(meta(mlp, 64, 10, 10, 10))
    pins = {"parameters": {"up.weight": "S(0)"}, "inputs": {"*": "S(0)"}}
    plan = planned(given, slow_devices(a=4), pins=pins)
    stage = plan.stages[0]
    gathered = [c for c in stage.reshardings if c.source == "S(0)" and c.target == "R"]
    (resharding,) = [c for c in gathered if c.value == "p_up_weight"]
    events = simulate(plan, bucketed=False).events
    (piece,) = (
        event
        for event in events
        if event.name == "all_gather" and event.subject == f"up.weight for {resharding.consumer}"
    )
    nbytes = 12 * 10 * 4
    assert piece.nbytes == nbytes
    alone = plan.mesh.collective_time("all_gather", 0, nbytes)
    assert piece.seconds == pytest.approx(alone + plan.mesh.copy_time(nbytes), abs=2e-9)
