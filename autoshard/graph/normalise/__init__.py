"""Normalisation: a chain of passes, each of which returns an equivalent, simpler graph.

Properties of a normalised graph:

* no sub-graphs, no assertions, no in-place operators, no `out` arguments;
* no no-ops, no dead code;
* `view`, `flatten` and `unflatten` are `aten.reshape.default`, every change of element type
  is `aten.to.dtype`, and no size or dim argument is negative (see `autoshard.graph.dims`);
* a mean cross-entropy is a sum divided by a count, so that both can be summed over ranks;
* recognised mixtures of experts use the operators of `autoshard.graph.experts`;
* each tied parameter is one input;
* values that do not depend on inputs are prepared inputs, which `Graph.preparation` computes once;
* `Tensor.requires_grad` of every value is True if a gradient flows to it in training.
"""

from collections.abc import Sequence

from autoshard.graph.archive.parse import Program
from autoshard.graph.checks import check_wiring
from autoshard.graph.ir import Graph
from autoshard.graph.normalise.experts import group_experts
from autoshard.graph.normalise.functional import make_functional
from autoshard.graph.normalise.gradients import propagate_gradients
from autoshard.graph.normalise.inline import inline_regions
from autoshard.graph.normalise.loss import split_mean_losses
from autoshard.graph.normalise.out_arguments import without_out_arguments
from autoshard.graph.normalise.prepare import prepare
from autoshard.graph.normalise.simplify import drop_dead_code, make_explicit, simplify
from autoshard.graph.normalise.ties import merge_ties


def normalise(program: Program, *, ties: Sequence[Sequence[str]] | None = None) -> Graph:
    """Normalise a parsed program.

    Args:
        program: the parsed program.
        ties: groups of names of tied parameters; None if unknown.

    Raises:
        SchemaError: the program is invalid, for example uses undefined values.
        UnsupportedError: it uses a feature that cannot be expressed with functional operators.
    """
    graph = inline_regions(program)
    check_wiring(graph)
    # An `out` argument becomes a copy in place. To write through views, dims must be explicit.
    graph = make_explicit(without_out_arguments(graph))
    graph = drop_dead_code(make_functional(graph))
    # Of tied names, the one that is used stays; dead code may use others.
    graph = merge_ties(graph, ties)
    # A `detach` is a no-op only where no gradient flows.
    graph = simplify(propagate_gradients(graph))
    # Patterns of one canonical form each. Both leave dead code, and new values without gradients.
    graph = group_experts(split_mean_losses(graph))
    graph = propagate_gradients(drop_dead_code(graph))
    graph = prepare(graph, merges=not program.has_dynamic_sizes)
    check_wiring(graph)
    return graph
