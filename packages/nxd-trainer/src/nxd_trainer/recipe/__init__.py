"""The recipe: everything that defines a training run, as frozen dataclasses.

A recipe is read from a TOML, YAML or JSON file plus `section.key=value` overrides, checked as a whole, and
saved beside the run. The model, the data and the loop interpret the keys.
"""

from nxd_trainer.recipe.checks import RecipeError, check_layout, check_paths, padded_vocab_size
from nxd_trainer.recipe.files import (
    RUN_RECIPE_FILE,
    flat_recipe,
    given_keys,
    load_recipe,
    read_run_recipe,
    recipe_from_dict,
    recipe_keys,
    recipe_switches,
    recipe_to_dict,
    render_draft,
    save_recipe,
)
from nxd_trainer.recipe.sections import Recipe

__all__ = [
    # the recipe
    "Recipe",
    # reading and writing
    "load_recipe",
    "flat_recipe",
    "given_keys",
    "recipe_from_dict",
    "recipe_to_dict",
    "render_draft",
    "save_recipe",
    "read_run_recipe",
    "RUN_RECIPE_FILE",
    # checking
    "RecipeError",
    "check_layout",
    "check_paths",
    "padded_vocab_size",
    # describing
    "recipe_keys",
    "recipe_switches",
]
