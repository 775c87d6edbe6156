"""Every key of a recipe has a rule for resuming; those that are told are compared one by one."""

import pytest
from nxd_trainer.recipe import load_recipe, recipe_to_dict
from nxd_trainer.recipe.files import recipe_keys
from nxd_trainer.training.resuming import changes_to_report, rate_change, rule_of

RULES = {name: rule_of(name) for name in recipe_keys()}
# Looked at when they were added; a new key of these sections must be looked at, too.
NUM_KEYS = {"model": 17, "data": 18, "lora": 10, "dpo": 3}
OTHER_VALUES = {
    "optimizer.lr": "0.5",
    "optimizer.schedule": "linear",
    "optimizer.betas": "0.8,0.9",
    "train.steps": "400",
    "train.global_batch_size": "32",
    "train.autocast": "bfloat16",
    "moe.aux_loss_scope": "sequence",
    "checkpoint.initial_weights": "elsewhere",
    "data.evaluation_path": "elsewhere",
    "parallel.zero_stage": "1",
}


def test_every_key_has_a_rule_and_new_ones_are_noticed():
    assert set(RULES.values()) == {"free", "reported", "refused", "compared"}
    found = {section: sum(name.startswith(f"{section}.") for name in RULES) for section in NUM_KEYS}
    assert found == NUM_KEYS


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_change_that_is_told_names_the_key_with_both_values(key):
    before = recipe_to_dict(load_recipe(None, []))

    (line,) = changes_to_report(load_recipe(None, [f"{key}={OTHER_VALUES[key]}"]), before)

    assert line.startswith(f"{key} ")
    assert " -> " in line


def test_same_recipe_tells_nothing_and_keys_of_later_versions_have_their_defaults():
    before = recipe_to_dict(load_recipe(None, []))
    del before["optimizer"]["schedule"], before["moe"]

    assert changes_to_report(load_recipe(None, ["output=elsewhere", "train.log_every=3"]), before) == []


def test_longer_run_tells_how_its_schedule_changes_the_next_rate():
    keys = ["optimizer.lr=0.01", "optimizer.warmup_steps=0", "optimizer.min_lr_ratio=0.1"]
    finished = recipe_to_dict(load_recipe(None, [*keys, "train.steps=40"]))

    line = rate_change(load_recipe(None, [*keys, "train.steps=60"]), finished, 40)

    assert line is not None
    assert line.startswith("the learning rate of step 41 is 3.3e-03 by the new length and schedule, and was 1.0e-03 by")
    assert rate_change(load_recipe(None, [*keys, "train.steps=40", "train.global_batch_size=4"]), finished, 20) is None
