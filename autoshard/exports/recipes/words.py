"""Layouts of other frameworks in a few words, as recipes."""

from collections.abc import Mapping
from dataclasses import replace

from autoshard.errors import OptionError
from autoshard.exports.recipes.megatron import recipe_of_arguments
from autoshard.exports.recipes.recipe import Recipe

_ZERO = {"ddp": 0, "zero1": 1, "fsdp2": 3, "hsdp": 3}
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
_LEFT = ("activation_checkpointing", "master_weights", "accumulation_dtype", "optimizer")
"""Options that arguments of Megatron-LM set, and a layout in words leaves to the request."""


def recipe_of_words(text: str) -> Recipe:
    """Read a family of layouts and its sizes, such as `megatron tp=8 pp=4 vpp=2 sp zero1`.

    | family     | sizes and switches                                                              |
    |------------|---------------------------------------------------------------------------------|
    | `ddp`, `zero1`, `fsdp2` | none                                                               |
    | `hsdp`     | `shard`, ranks that shard a parameter                                           |
    | `megatron` | `tp`, `pp`, `vpp`, `cp`, `ep`, `etp`, `layers`; `sp` for sequence parallelism,  |
    |            | `zero1` for the distributed optimizer, `fsdp` for Megatron FSDP                 |

    Args:
        text: the family, then sizes and switches, separated by spaces.

    Raises:
        OptionError: a word is unknown, or a size is malformed.
    """
    family, *words = text.split() or [""]
    sizes = {name: number for name, sign, number in map(_parted, words) if sign}
    switches = [word for word in words if "=" not in word]
    if family == "megatron":
        return _megatron(sizes, switches)
    if family not in _ZERO:
        known = ", ".join([*_ZERO, "megatron"])
        raise OptionError(f"layout {text!r}: the family is one of {known}")
    _check(family, [*sizes, *switches], ("shard",) if family == "hsdp" else ())
    shard = sizes.get("shard", "")
    if family == "hsdp" and (not shard.isdigit() or not int(shard)):
        raise OptionError(f"layout {text!r}: give the ranks that shard a parameter, shard=NUMBER")
    options = {"reshard_after_forward": "always"} if _ZERO[family] > 1 else {}
    return Recipe(
        framework=family,
        pattern="data",
        zero=_ZERO[family],
        shard=int(shard) if shard else None,
        replicate=None if shard else 1,
        options=options,
    )


def _megatron(sizes: Mapping[str, str], switches: list[str]) -> Recipe:
    _check("megatron", sizes, tuple(_SIZES))
    _check("megatron", switches, tuple(_SWITCHES))
    arguments = [part for name, size in sizes.items() for part in (_SIZES[name], size)]
    arguments += [_SWITCHES[name] for name in switches]
    found = recipe_of_arguments(arguments)
    options = {name: value for name, value in found.options.items() if name not in _LEFT}
    return replace(found, options=options)


def _parted(word: str) -> tuple[str, str, str]:
    return word.partition("=")


def _check(family: str, names: Mapping[str, str] | list[str], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            allowed = f"; it knows {', '.join(known)}" if known else ""
            raise OptionError(f"layout {family!r} has no {name!r}{allowed}")
