"""Layouts of other frameworks in a few words."""

from typing import Any

import pytest

from autoshard.errors import OptionError
from autoshard.exports import read_like, read_megatron

LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "ddp": ({"dp": 16}, {"algo": "ddp", "distributed_optimizer": False}),
    "zero1": ({"dp": 16}, {"algo": "ddp", "distributed_optimizer": True}),
    "fsdp2": ({"dp": 16}, {"algo": "fsdp2", "reshard_after_forward": "always"}),
    "hsdp shard=4": ({"replicate": 4, "shard": 4}, {"algo": "hsdp"}),
    "megatron": ({"dp": 16}, {"algo": "megatron", "stages": None}),
    "megatron tp=2 pp=2 vpp=2 layers=8 sp zero1": (
        {"pp": 2, "dp": 4, "tp": 2},
        {
            "algo": "megatron-sp",
            "distributed_optimizer": True,
            "stages": 4,
            "stages_per_rank": 2,
            "schedule": "Interleaved1F1B",
            "balance": (2, 2, 2, 2),
        },
    ),
    "megatron cp=2 ep=4 fsdp": (
        {"dp": 2, "ep": 4, "cp": 2},
        {"distributed_optimizer": True, "reshard_after_forward": "always"},
    ),
    "megatron tp=2 ep=8 etp=1": (
        {"dp": 2, "ep": 4, "tp": 2},
        {"algo": "megatron", "runtime": "autoshard"},
    ),
}


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_layout_is_axes_and_options(text: str) -> None:
    axes, options = LAYOUTS[text]
    found = read_like(text, num_ranks=16)
    assert dict(found.axes) == axes
    for name, value in options.items():
        assert found.options.value(name) == value
    left = {"micro_batches", "optimizer", "master_weights", "activation_checkpointing"}
    assert not left & set(found.options.given)


def test_a_command_line_of_megatron_is_read_with_its_other_options() -> None:
    sizes = "--tensor-model-parallel-size 2 --sequence-parallel --bf16"
    found = read_like(f"torchrun pretrain_gpt.py {sizes} --lr 1e-4", num_ranks=16)
    assert found == read_megatron(sizes, num_ranks=16)
    assert found.axes == (("dp", 8), ("tp", 2))
    assert found.options.training.master_weights
    assert "micro_batches" not in found.options.given
    batch = "--micro-batch-size 2 --global-batch-size 64"
    assert read_like(f"{sizes} {batch}", num_ranks=16).options.training.micro_batches == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the family is one of ddp, zero1, fsdp2, hsdp, megatron"),
        ("fsdp", "the family is one of"),
        ("hsdp", "shard=NUMBER"),
        ("hsdp shard=3", "16 data-parallel ranks cannot be divided by 3"),
        ("ddp tp=2", "layout 'ddp' has no 'tp'"),
        ("megatron dp=2", "has no 'dp'; it knows tp, pp, vpp, cp, ep, etp, layers"),
        ("megatron zero3", "has no 'zero3'; it knows sp, zero1, fsdp"),
        ("megatron tp=3", "16 ranks cannot be divided by 3"),
        ("megatron tp=two", "invalid int value"),
        ("megatron ep=32", "16 data-parallel ranks cannot be divided by 32"),
    ],
)
def test_a_wrong_layout_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        read_like(text, num_ranks=16)


def test_arguments_of_megatron_say_the_same() -> None:
    arguments = (
        "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --sequence-parallel "
        "--use-distributed-optimizer"
    )
    one = read_megatron(arguments, num_ranks=16)
    other = read_like("megatron tp=2 ep=2 sp zero1", num_ranks=16)
    assert one.axes == other.axes == (("dp", 4), ("ep", 2), ("tp", 2))
    assert one.options.constraints.algo == other.options.constraints.algo == "megatron-sp"
