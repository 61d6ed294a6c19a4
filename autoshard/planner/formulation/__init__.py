"""From graph, mesh and options to the problem, and from its solution back to a stage."""
