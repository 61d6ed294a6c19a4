"""Recomputation, derived from plan and program."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.meshes import slow_devices
from support.models import Planner, gpt2, graph_of, meta

from autoshard.errors import PlanError
from autoshard.graph import Graph
from autoshard.layouts import Action
from autoshard.lowering.instructions import count_collectives
from autoshard.lowering.recompute import recomputed
from autoshard.ops import SavedByAutograd, call_of, saved_tensors
from autoshard.plan import Checkpoint, Stage
from autoshard.plan.stage import Use

Made = tuple[Graph, Stage]


@pytest.fixture(scope="module")
def made(planned: Planner) -> Made:
    """A small GPT-2 with parameters cut over four ranks; nothing runs twice."""
    graph = graph_of(meta(gpt2, layers=1))
    pins = {"parameters": {"*": "S(0)"}, "inputs": {"*": "S(0)"}}
    (stage,) = planned(graph, slow_devices(dp=4), pins=pins).stages
    return graph, resharded_again(stage, frozenset()).model_copy(update={"checkpoints": ()})


def resharded_again(stage: Stage, again: frozenset[Use]) -> Stage:
    reshardings = (c.model_copy(update={"regather": c.use in again}) for c in stage.reshardings)
    return stage.model_copy(update={"reshardings": tuple(reshardings)})


def checkpointing(graph: Graph, stage: Stage, *spans: tuple[int, int]) -> Stage:
    checkpoints = [
        Checkpoint(first=graph.nodes[first].name, last=graph.nodes[last].name)
        for first, last in spans
    ]
    return stage.model_copy(update={"checkpoints": tuple(checkpoints)})


def saves(graph: Graph, number: int) -> SavedByAutograd:
    node = graph.nodes[number]
    gradients = [graph.values[value].requires_grad for value in node.inputs]
    return saved_tensors(call_of(graph, node), gradients)


def test_nothing_runs_again_unless_the_plan_says_so(made: Made) -> None:
    graph, stage = made
    found = recomputed(graph, stage)
    assert not found.nodes
    assert not found.reshardings


@given(data=st.data())
@settings(max_examples=50, derandomize=True, deadline=None)
def test_a_checkpoint_runs_again_up_to_what_backward_needs(made: Made, data: st.DataObject) -> None:
    graph, stage = made
    first = data.draw(st.integers(0, len(graph.nodes) - 1))
    last = data.draw(st.integers(first, len(graph.nodes) - 1))
    found = recomputed(graph, checkpointing(graph, stage, (first, last)))
    saving = [i for i in range(first, last + 1) if saves(graph, i) != SavedByAutograd()]
    stop = saving[-1] if saving else first
    names = {node.name for node in graph.nodes[first:stop]}
    runs = bool(saving) and bool(saves(graph, stop).outputs or saves(graph, stop).extras)
    assert found.nodes == names | ({graph.nodes[stop].name} if runs else set())
    reached = names | ({graph.nodes[stop].name} if saving else set())
    inside = {value for node in graph.nodes[first : last + 1] for value in node.outputs}
    for resharding in stage.reshardings:
        if resharding.consumer is not None:
            assert (resharding.use in found.reshardings) == (resharding.consumer in reached)
        else:
            readers = {graph.nodes[i].name for i, _ in graph.consumers[resharding.value]}
            expected = resharding.value in inside and bool(readers & reached)
            assert (resharding.use in found.reshardings) == expected


@given(data=st.data())
@settings(max_examples=20, derandomize=True, deadline=None)
def test_what_runs_again_is_counted_in_backward(made: Made, data: st.DataObject) -> None:
    graph, stage = made
    uses = [resharding.use for resharding in stage.reshardings]
    marks = data.draw(st.integers(0, 2 ** len(uses) - 1))
    again = frozenset(name for i, name in enumerate(uses) if marks >> i & 1)
    edited = resharded_again(stage, again)
    assert recomputed(graph, edited).reshardings == again
    plain, found = (count_collectives((s,), (graph,)) for s in (stage, edited))
    added = Counter({(c.kind, c.axis, c.direction): c.nbytes for c in found})
    added.subtract({(c.kind, c.axis, c.direction): c.nbytes for c in plain})
    expected: Counter[tuple[str, str, str]] = Counter()
    for resharding in stage.reshardings:
        for step in resharding.steps:
            if resharding.use in again and Action(step.forward).is_collective:
                expected[step.forward, step.axis, "backward"] += step.nbytes
    assert +added == expected


def test_checkpoints_that_do_not_fit_are_named(made: Made) -> None:
    graph, stage = made
    unknown = stage.model_copy(update={"checkpoints": (Checkpoint(first="x", last="y"),)})
    with pytest.raises(PlanError, match="from 'x' to 'y' is not between nodes"):
        recomputed(graph, unknown)
    with pytest.raises(PlanError, match="ends before it begins"):
        recomputed(graph, checkpointing(graph, stage, (5, 4)))
    for spans in ([(0, 5), (5, 8)], [(6, 8), (0, 5)]):
        with pytest.raises(PlanError, match="in program order, without common"):
            recomputed(graph, checkpointing(graph, stage, *spans))


def test_again_inside_a_checkpoint_means_nothing(made: Made) -> None:
    graph, stage = made
    names = [node.name for node in graph.nodes]
    own = next(c for c in stage.reshardings if c.consumer in names)
    number = names.index(own.consumer)
    edited = checkpointing(graph, resharded_again(stage, frozenset({own.use})), (number, number))
    with pytest.raises(PlanError, match=f"'{own.value}' .* is `regather` inside a checkpoint"):
        recomputed(graph, edited)
