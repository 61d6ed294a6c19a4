"""Normalisation: a chain of small passes, each from a graph to an equal, simpler graph.

Guarantees of a normalised graph:

* no sub-graphs, no assertions, no operator that writes into its inputs;
* no operator that changes nothing, and no value that nothing uses;
* `view`, `flatten` and `unflatten` are `aten.reshape.default`, every change of element type
  is `aten.to.dtype`, and no size or dim argument is negative;
* a mean cross-entropy is a sum divided by a count, so that both can be summed over ranks;
* mixtures of experts that are recognised have operators of the library's own
  (`autoshard.graph.experts`);
* names of one tied parameter are one input;
* what follows from nothing that comes in is an input, and `Graph.preparation` makes it once;
* `Tensor.requires_grad` says for every value whether a gradient flows to it in training.
"""

from collections.abc import Sequence

from autoshard.graph.checks import check_wiring
from autoshard.graph.ir import Graph
from autoshard.graph.normalise.experts import group_experts
from autoshard.graph.normalise.functional import make_functional
from autoshard.graph.normalise.gradients import propagate_gradients
from autoshard.graph.normalise.inline import inline_regions
from autoshard.graph.normalise.loss import split_mean_losses
from autoshard.graph.normalise.prepare import prepare
from autoshard.graph.normalise.simplify import drop_dead_code, make_explicit, simplify
from autoshard.graph.normalise.ties import merge_ties
from autoshard.graph.parse import Program


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
