"""Normalisation: a chain of small passes, each from a graph to an equal, simpler graph.

What a normalised graph promises to everybody behind it:

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

from autoshard.graph.normalise.chain import normalise

__all__ = ["normalise"]
