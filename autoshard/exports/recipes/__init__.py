"""Recipes of other frameworks, read as meshes and options of planning, and tested by arithmetic.

A recipe is what somebody runs elsewhere: settings of torchtitan, arguments of Megatron-LM, a file
of accelerate or DeepSpeed, a `tp_plan`. Each reader makes a `Recipe` of them; `layout_of` has the
mesh and the options that it means, `recipe_problems` the reasons why it cannot run. Nothing of the
frameworks is imported, and no file is run.
"""

from autoshard.exports.recipes.facts import ProgramFacts, program_facts
from autoshard.exports.recipes.layout import RecipeLayout, layout_of, program_batch
from autoshard.exports.recipes.problems import recipe_problems
from autoshard.exports.recipes.read import read_like, read_megatron, read_recipe
from autoshard.exports.recipes.recipe import Recipe

__all__ = [
    "ProgramFacts",
    "Recipe",
    "RecipeLayout",
    "layout_of",
    "program_batch",
    "program_facts",
    "read_like",
    "read_megatron",
    "read_recipe",
    "recipe_problems",
]
