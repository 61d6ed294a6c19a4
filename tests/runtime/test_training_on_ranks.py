"""Batches, gradients, and many steps of training with a checkpoint between two plans."""

from collections.abc import Callable
from functools import partial

import pytest
from runtime import batches, bucketed
from runtime.training import Training
from runtime.transformers_on_ranks import OPTIONS
from support import models

NUM_RANKS = 4

CASES: dict[str, Callable[[], None]] = {
    **batches.CASES,
    **bucketed.CASES,
    "gpt2, thirds to fsdp": Training(
        partial(models.gpt2, batch=8),
        (
            ({"dp": 2, "tp": 2}, {"pins": {"parameters": {"*.c_attn.weight": "S(0),S(1)/1+1+1"}}}),
            ({"dp": 4}, OPTIONS["fsdp"]),
        ),
    ),
    "llama, sequence parallel to free": Training(
        partial(models.llama, batch=8),
        (({"dp": 2, "tp": 2}, OPTIONS["sequence"]), ({"dp": 4}, OPTIONS["free"])),
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_training(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
