"""Memory in the integer program: what is kept, recomputed and gathered again, and when."""
