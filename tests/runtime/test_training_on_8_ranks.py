"""Many steps of training on eight ranks, with a checkpoint between two plans."""

from collections.abc import Callable
from functools import partial

import pytest
from runtime.training import Training
from runtime.transformers_on_ranks import OPTIONS
from support import models

NUM_RANKS = 8

CASES = {
    "gpt2, megatron to fsdp": Training(
        partial(models.gpt2, batch=8),
        (({"dp": 2, "tp": 4}, OPTIONS["megatron"]), ({"dp": 8}, OPTIONS["fsdp"])),
    ),
    "llama, hsdp to three axes": Training(
        partial(models.llama, batch=8),
        (({"dp": 2, "tp": 4}, OPTIONS["hsdp"]), ({"a": 2, "b": 2, "c": 2}, OPTIONS["free"])),
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_training(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
