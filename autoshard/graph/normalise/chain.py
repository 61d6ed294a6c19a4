"""The order of the passes."""

from collections.abc import Sequence

from autoshard.graph.ir import Graph
from autoshard.graph.normalise.dead import drop_dead_code
from autoshard.graph.normalise.experts import group_experts
from autoshard.graph.normalise.explicit import make_explicit
from autoshard.graph.normalise.functional import make_functional
from autoshard.graph.normalise.gradients import propagate_gradients
from autoshard.graph.normalise.inline import inline_regions
from autoshard.graph.normalise.loss import split_mean_losses
from autoshard.graph.normalise.prepare import prepare
from autoshard.graph.normalise.simplify import simplify
from autoshard.graph.normalise.ties import merge_ties
from autoshard.graph.program import Program
from autoshard.graph.wiring import check_wiring


def normalise(program: Program, *, ties: Sequence[Sequence[str]] | None = None) -> Graph:
    """Bring a parsed program into the form that planning expects.

    Args:
        program: the program as it arrived.
        ties: groups of parameter names that are one tensor each; None where unknown.

    Raises:
        SchemaError: the program uses values that it does not make.
        UnsupportedError: it uses a feature that has no equal among plain operators.
    """
    graph = inline_regions(program)
    check_wiring(graph)
    graph = make_explicit(graph)
    graph = drop_dead_code(make_functional(graph))
    graph = merge_ties(graph, ties)
    graph = simplify(propagate_gradients(graph))
    graph = group_experts(split_mean_losses(graph))
    graph = propagate_gradients(drop_dead_code(graph))
    graph = prepare(graph, merges=not program.has_open_sizes)
    check_wiring(graph)
    return graph
