"""Modes that forward reads, and whether they make a difference.

In: a `Recorder` of `recording`. Out: the reads of modes that change what a module computes, found
by running it in each combination of them (`effects`) and comparing what it did (`events`). It
imports all other packages of `python_state`.
"""
