"""Lower bounds: elimination, tree-reweighted message passing, quotients of repeated blocks."""
