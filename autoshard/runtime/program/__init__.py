"""A stage's program on one rank: instructions, kernels and collectives."""
