"""Rules for which keys a run may change when it resumes.

A test checks that every key of a recipe has a rule, so that no change goes unreported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from nxd_trainer.recipe.files import recipe_from_dict, recipe_keys, recipe_to_dict
from nxd_trainer.recipe.sections import Recipe

# free: changes results only by rounding, or is reported elsewhere. told: deliberately changes the rest of the run, and
# is reported. refused: the value must be the same. compared: its result must be the same: the model, its tokens and
# their order, or the weights that adapters need.
Rule = Literal["free", "told", "refused", "compared"]

_OF_SECTIONS: dict[str, Rule] = {
    "model": "compared",
    "parallel": "free",
    "moe": "told",
    "pipeline": "free",
    "data": "compared",
    "train": "told",
    "optimizer": "told",
    "lora": "refused",
    "dpo": "refused",
    "checkpoint": "free",
    "": "free",
}
_OF_KEYS: dict[str, Rule] = {
    "model.path": "told",  # the weights now come from the checkpoint
    "parallel.zero1": "told",  # it adds master weights for low-precision weights
    "data.evaluation_path": "told",
    "data.cache_folder": "free",
    "train.stop_after": "free",
    "train.gradient_accumulation_steps": "free",
    "train.log_every": "free",
    "train.gradient_histograms_every": "free",
    "train.report_to": "free",
    "train.seed": "compared",
    "train.dtype": "refused",
    "optimizer.type": "refused",
    "optimizer.factory": "refused",
    "lora.save": "free",  # except for merged weights
    "checkpoint.initial_weights": "told",
}


def rule_of(key: str) -> Rule:
    """Return the rule for a run that resumes with a different value for a key, such as "train.steps"."""
    return _OF_KEYS[key] if key in _OF_KEYS else _OF_SECTIONS[key.rpartition(".")[0]]


def changes_to_tell(recipe: Recipe, of_checkpoint: Mapping[str, Any]) -> list[str]:
    """Return lines such as "optimizer.lr 0.001 -> 0.01" for the changed keys that must be reported.

    Args:
        recipe: the recipe that the run resumes with.
        of_checkpoint: the checkpoint's recipe, from `recipe_to_dict`; keys that it lacks have their defaults.
    """
    defaults = recipe_to_dict(recipe_from_dict({}))
    own = recipe_to_dict(recipe)

    def value(content: Mapping[str, Any], section: str, field: str) -> Any:
        of_section = content.get(section)
        found = of_section.get(field) if isinstance(of_section, Mapping) else None
        return defaults[section].get(field) if found is None else found

    keys = [(name, name.partition(".")) for name in recipe_keys() if rule_of(name) == "told"]
    pairs = {name: (value(of_checkpoint, it[0], it[2]), value(own, it[0], it[2])) for name, it in keys}
    return [f"{name} {before} -> {now}" for name, (before, now) in pairs.items() if before != now]
