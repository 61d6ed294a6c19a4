"""Lowering: layouts as what each rank runs, with its buckets, recomputation and memory."""
