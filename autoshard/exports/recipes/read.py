"""Reading a recipe: the reader of a file or text, by its content."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoshard.base.files import read_file
from autoshard.errors import OptionError
from autoshard.exports.recipes.accelerate import recipe_of_accelerate
from autoshard.exports.recipes.deepspeed import recipe_of_deepspeed
from autoshard.exports.recipes.layout import RecipeLayout, layout_of
from autoshard.exports.recipes.megatron import (
    recipe_of_arguments,
    recipe_of_bridge,
    recipe_of_script,
)
from autoshard.exports.recipes.recipe import Recipe
from autoshard.exports.recipes.settings_files import (
    constants_of_python,
    flattened,
    settings_of_file,
    settings_of_function,
)
from autoshard.exports.recipes.torchtitan import recipe_of_torchtitan
from autoshard.exports.recipes.tp_plan import recipe_of_tp_plan
from autoshard.exports.recipes.words import recipe_of_words

_ACCELERATE = frozenset(
    {"distributed_type", "fsdp_config", "parallelism_config", "dp_shard_size", "dp_replicate_size"}
)
_DEEPSPEED = frozenset({"zero_optimization", "train_micro_batch_size_per_gpu"})
_TP_PLAN = frozenset({"tp_plan", "base_model_tp_plan", "TP_PLAN"})
_BRIDGE = "tensor_model_parallel_size"
_FORMATS = (
    "torchtitan's TOML, accelerate's YAML or JSON, DeepSpeed's JSON, Megatron-Bridge's YAML, a "
    "tp_plan, a script with arguments of Megatron-LM, or FILE.py:FUNCTION of torchtitan or "
    "Megatron-Bridge"
)


def read_recipe(source: str) -> Recipe:
    """Read a recipe of another framework.

    Args:
        source: a file, `FILE.py:FUNCTION` (which is read, not run), a command line of Megatron-LM,
            or a layout in words, see `recipe_of_words`.

    Raises:
        OptionError: it is none of these, or a setting is malformed.

    Example:
        >>> read_recipe("megatron tp=8 pp=4 sp zero1").tensor
        8
    """
    name, colon, function = source.rpartition(":")
    if colon and name.endswith(".py"):
        return _of_settings(settings_of_function(Path(name), function), source)
    path = Path(source)
    if path.suffix in {".toml", ".yaml", ".yml", ".json", ".py", ".sh", ".txt"}:
        return _of_file(path)
    return recipe_of_arguments(source) if "--" in source else recipe_of_words(source)


def _of_file(path: Path) -> Recipe:
    if path.suffix in {".sh", ".txt"}:
        return recipe_of_script(read_file(path, OptionError).decode(errors="replace"))
    if path.suffix == ".py":
        return recipe_of_tp_plan(constants_of_python(path))
    return _of_settings(settings_of_file(path), str(path))


def _of_settings(settings: Mapping[str, Any], source: str) -> Recipe:
    names, flat = set(settings), flattened(settings)
    if names & _DEEPSPEED:
        return recipe_of_deepspeed(settings)
    if names & _ACCELERATE:
        return recipe_of_accelerate(settings)
    if names & _TP_PLAN:
        return recipe_of_tp_plan(settings)
    if any(place.rpartition(".")[2] == _BRIDGE for place in flat):
        return recipe_of_bridge(flat)
    if {"parallelism", "training"} & {place.partition(".")[0] for place in flat}:
        return recipe_of_torchtitan(flat)
    if settings and all(isinstance(value, str) for value in settings.values()):
        return recipe_of_tp_plan(settings)
    raise OptionError(f"{source} is no recipe that is known: {_FORMATS}")


def read_like(text: str, *, num_ranks: int) -> RecipeLayout:
    """The layout of a recipe whose program is not known: `layout_of` what `read_recipe` finds.

    Args:
        text: as for `read_recipe`.
        num_ranks: number of all ranks.

    Raises:
        OptionError: it cannot be read, or its sizes do not divide the ranks.

    Example:
        >>> found = read_like("megatron tp=8 pp=4 sp zero1", num_ranks=64)
        >>> names, sizes = zip(*found.axes)
        >>> plan = make_plan(graph, make_mesh(sizes, axes=names), found.options)
    """
    return layout_of(read_recipe(text), num_ranks)


def read_megatron(arguments: str | Sequence[str], *, num_ranks: int) -> RecipeLayout:
    """The layout of arguments of Megatron-LM.

    Args:
        arguments: the command line, or its parts; arguments of model, data and optimizer are
            ignored.
        num_ranks: number of all ranks.

    Raises:
        OptionError: sizes do not divide each other, an argument is malformed, or it sets a kind of
            parallelism that options do not have.

    Example:
        >>> found = read_megatron("--tensor-model-parallel-size 8 ...", num_ranks=64)
        >>> names, sizes = zip(*found.axes)
        >>> plan = make_plan(graph, make_mesh(sizes, axes=names), found.options)
    """
    return layout_of(recipe_of_arguments(arguments), num_ranks)
