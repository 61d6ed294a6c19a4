"""Exports: plans as code or settings of other frameworks, and layouts of these read.

A target is a function from an `Outline` to text, registered with `export_target` in a module of
`autoshard.exports.targets`. Exports read only the plan, and do not need torch.
"""

from typing import TYPE_CHECKING

from autoshard.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.exports.export import (
        EXPORT_TARGETS,
        code_exports,
        export_plan,
        expressed_share,
    )
    from autoshard.exports.expressed import Expressed
    from autoshard.exports.recipes import (
        ProgramFacts,
        Recipe,
        RecipeLayout,
        layout_of,
        program_batch,
        program_facts,
        read_like,
        read_megatron,
        read_recipe,
        recipe_problems,
    )
    from autoshard.exports.registry import ExportTarget
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "EXPORT_TARGETS",
    "ExportTarget",
    "Expressed",
    "ProgramFacts",
    "Recipe",
    "RecipeLayout",
    "code_exports",
    "export_plan",
    "expressed_share",
    "layout_of",
    "program_batch",
    "program_facts",
    "read_like",
    "read_megatron",
    "read_recipe",
    "recipe_problems",
]
