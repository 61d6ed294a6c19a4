"""The integer program of a graph, a mesh and options."""
