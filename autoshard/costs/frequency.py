"""Frequency of a parameter's reshardings in a training step of several micro-batches."""

from enum import StrEnum


class Frequency(StrEnum):
    """Number of runs of the steps of a parameter's resharding in a training step."""

    MICRO_BATCH = "micro_batch"
    """All steps in every micro-batch."""
    REDUCE_STEP = "reduce_step"
    """The first steps, which only reduce the gradient, once per training step, which needs no
    memory; the others in every micro-batch."""
    GATHER_STEP = "gather_step"
    """As `REDUCE_STEP`, and the forward actions of all steps once per training step."""
    STEP = "step"
    """All steps once per training step."""


GATHERED_ONCE = frozenset({Frequency.GATHER_STEP, Frequency.STEP})
"""Frequencies with which a parameter stays gathered until the last micro-batch."""
