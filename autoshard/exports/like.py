"""Layouts of other frameworks in a few words, as axes of a mesh and options of planning."""

from collections.abc import Mapping
from typing import Any

from autoshard.errors import OptionError
from autoshard.exports.megatron_arguments import MegatronLayout, read_megatron
from autoshard.plan.options import PlanOptions

_DATA_PARALLEL: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"algo": "ddp"},
    "zero1": {"algo": "ddp", "distributed_optimizer": True},
    "fsdp2": {"algo": "fsdp2", "reshard_after_forward": "always"},
    "hsdp": {"algo": "hsdp", "reshard_after_forward": "always"},
}
_SIZES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "layers": "--num-layers",
}
_SWITCHES = {
    "sp": "--sequence-parallel",
    "zero1": "--use-distributed-optimizer",
    "fsdp": "--use-megatron-fsdp",
}
_LAYOUT = (
    *("algo", "distributed_optimizer", "reshard_after_forward", "regather_activations"),
    *("stages", "stages_per_rank", "schedule", "balance"),
)
"""Options of a layout; the others that arguments of Megatron-LM set are left to the request."""


def read_like(text: str, *, num_ranks: int) -> MegatronLayout:
    """Read a family of layouts and its sizes, such as `megatron tp=8 pp=4 vpp=2 sp zero1`.

    A text with arguments of Megatron-LM, such as `--tensor-model-parallel-size 8 --bf16`, is read
    by `read_megatron`.

    | family     | sizes and switches                                                              |
    |------------|---------------------------------------------------------------------------------|
    | `ddp`, `zero1`, `fsdp2` | none                                                               |
    | `hsdp`     | `shard`, ranks that shard a parameter                                           |
    | `megatron` | `tp`, `pp`, `vpp`, `cp`, `ep`, `etp`, `layers`; `sp` for sequence parallelism,  |
    |            | `zero1` for the distributed optimizer, `fsdp` for Megatron FSDP                 |

    Args:
        text: the family, then sizes and switches, separated by spaces; or a command line.
        num_ranks: number of all ranks.

    Raises:
        OptionError: a word is unknown, or the sizes do not divide the ranks.

    Example:
        >>> found = read_like("megatron tp=8 pp=4 sp zero1", num_ranks=64)
        >>> names, sizes = zip(*found.axes)
        >>> plan = make_plan(graph, make_mesh(sizes, axes=names), found.options)
    """
    if "--" in text:
        return read_megatron(text, num_ranks=num_ranks)
    family, *words = text.split() or [""]
    sizes = {name: number for name, sign, number in map(_parted, words) if sign}
    switches = [word for word in words if "=" not in word]
    if family == "megatron":
        return _megatron(sizes, switches, num_ranks)
    if family not in _DATA_PARALLEL:
        known = ", ".join([*_DATA_PARALLEL, "megatron"])
        raise OptionError(f"layout {text!r}: the family is one of {known}")
    allowed = ("shard",) if family == "hsdp" else ()
    _check(family, [*sizes, *switches], allowed)
    options = PlanOptions(**_DATA_PARALLEL[family])
    axes: tuple[tuple[str, int], ...] = (("dp", num_ranks),)
    if family == "hsdp":
        shard = sizes.get("shard", "")
        if not shard.isdigit() or not int(shard) or num_ranks % int(shard):
            raise OptionError(
                f"layout {text!r}: give the ranks that shard a parameter, shard=NUMBER, "
                f"which divides {num_ranks}"
            )
        axes = (("replicate", num_ranks // int(shard)), ("shard", int(shard)))
    return MegatronLayout(axes, options, ())


def _megatron(sizes: Mapping[str, str], switches: list[str], num_ranks: int) -> MegatronLayout:
    _check("megatron", sizes, tuple(_SIZES))
    _check("megatron", switches, tuple(_SWITCHES))
    arguments = [part for name, size in sizes.items() for part in (_SIZES[name], size)]
    arguments += [_SWITCHES[name] for name in switches]
    found = read_megatron(arguments, num_ranks=num_ranks)
    given = {name: value for name, value in found.options.given.items() if name in _LAYOUT}
    return MegatronLayout(found.axes, PlanOptions(**given), found.chosen)


def _parted(word: str) -> tuple[str, str, str]:
    return word.partition("=")


def _check(family: str, names: Mapping[str, str] | list[str], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            allowed = f"; it knows {', '.join(known)}" if known else ""
            raise OptionError(f"layout {family!r} has no {name!r}{allowed}")
