"""Batches, gradients, and training steps with a checkpoint between two plans."""

from collections.abc import Callable
from functools import partial

import pytest
from runtime.cases import gradients, loaders
from support import models
from support.long_cases import long_of, with_long
from support.ranks import joined
from support.training import Resumed, Training
from support.transformer_plans import OPTIONS

NUM_RANKS = 4
NOISE = {"dropout*": "S(0)", "scaled_dot_product_attention*": "S(0)"}

CASES: dict[str, Callable[[], None]] = {
    **joined(loaders, gradients),
    "gpt2, thirds to fsdp": Training(
        partial(models.gpt2, batch=8),
        (
            ({"dp": 2, "tp": 2}, {"pins": {"parameters": {"*.c_attn.weight": "S(0),S(1)/1+1+1"}}}),
            ({"dp": 4}, OPTIONS["fsdp"]),
        ),
    ),
    "gpt2 with dropout, goes on": Resumed(
        partial(models.gpt2, dropout=0.2),
        tuple(
            {"pins": {"parameters": {"*": at_rest}, "inputs": {"*": "S(0)"}, "nodes": NOISE}}
            for at_rest in ("I", "S(0)")
        ),
    ),
    "llama, sequence parallel to free": Training(
        partial(models.llama, batch=8),
        (({"dp": 2, "tp": 2}, OPTIONS["sequence"]), ({"dp": 4}, OPTIONS["free"])),
    ),
}

LONG = long_of(gradients)


@pytest.mark.matrix(2)
@pytest.mark.ranks
@pytest.mark.parametrize("case", with_long(CASES, LONG))
def test_training(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
