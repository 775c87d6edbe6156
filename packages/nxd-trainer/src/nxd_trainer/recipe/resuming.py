"""What a run may change when it resumes, key by key.

A test holds that every key of a recipe has its rule, so that none changes a run without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from nxd_trainer.recipe.files import recipe_from_dict, recipe_keys, recipe_to_dict
from nxd_trainer.recipe.sections import Recipe

# free: changes no number but by rounding, or is said anyway. told: changes what comes after, as people want, and is
# said. refused: the value must be the same. compared: what it leads to must be the same, which is the model, its tokens
# and their order, or the weights that adapters need.
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
    "model.path": "told",  # its weights are those of the checkpoint by then
    "parallel.zero1": "told",  # narrow weights have masters with it
    "data.evaluation_path": "told",
    "data.cache_folder": "free",
    "train.stop_after": "free",
    "train.gradient_accumulation_steps": "free",
    "train.log_every": "free",
    "train.report_to": "free",
    "train.seed": "compared",
    "train.dtype": "refused",
    "optimizer.type": "refused",
    "optimizer.factory": "refused",
    "lora.save": "free",  # but for merged weights
    "checkpoint.initial_weights": "told",
}


def rule_of(key: str) -> Rule:
    """What happens where a run resumes with another value for a key, such as "train.steps"."""
    return _OF_KEYS[key] if key in _OF_KEYS else _OF_SECTIONS[key.rpartition(".")[0]]


def changes_to_tell(recipe: Recipe, of_checkpoint: Mapping[str, Any]) -> list[str]:
    """Lines such as "optimizer.lr 0.001 -> 0.01", of keys that may change and are told.

    Args:
        recipe: that a run resumes with.
        of_checkpoint: as `recipe_to_dict` gave it; keys that were not known then have their defaults.
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
