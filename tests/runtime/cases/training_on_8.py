"""Many steps of training on eight ranks, with a checkpoint between two plans."""

from functools import partial

from support import models
from support.training import Training
from support.transformer_plans import OPTIONS

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
LONG = ("gpt2, megatron to fsdp",)
"""Other layouts of 8 ranks are in the other one."""
