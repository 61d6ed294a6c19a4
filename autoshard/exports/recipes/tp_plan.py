"""A `tp_plan` of transformers as a recipe."""

from collections.abc import Mapping
from typing import Any

from autoshard.errors import OptionError
from autoshard.exports.recipes.recipe import Recipe


def recipe_of_tp_plan(settings: Mapping[str, Any]) -> Recipe:
    """Read a `tp_plan` with its number of ranks.

    Args:
        settings: `TP_PLAN` (`tp_plan`, `base_model_tp_plan`) and `TP_SIZE` (`tp_size`), or the
            rules alone.

    Raises:
        OptionError: there are no rules, or one is no text.
    """
    found = {name.lower(): value for name, value in settings.items()}
    rules = next((found[n] for n in ("tp_plan", "base_model_tp_plan") if n in found), settings)
    if not isinstance(rules, Mapping) or not rules:
        raise OptionError("there is no tp_plan: give rules such as {'*.q_proj': 'colwise'}")
    if not all(isinstance(style, str) for style in rules.values()):
        raise OptionError("the rules of a tp_plan are texts, such as 'colwise'")
    size = found.get("tp_size")
    return Recipe(
        framework="transformers",
        pattern="layers",
        num_ranks=size if isinstance(size, int) else None,
        tensor=size if isinstance(size, int) else 0,
        tp_plan=dict(rules),
    )
