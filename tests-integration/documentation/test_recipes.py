"""Every recipe that a page shows is one: its keys exist, its values are valid, and they go together."""

import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from nxd_trainer.recipe import Recipe, recipe_from_dict
from pages import blocks_of

ROOT = Path(__file__).parents[2]
SECTIONS = {field.name for field in fields(Recipe)}
TABLES = [
    pytest.param(table, id=f"{page.name}:{block.line}")
    for page in sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")])
    for block in blocks_of(page.read_text(encoding="utf8"))
    if block.language == "toml" and (table := tomllib.loads(block.text)).keys() <= SECTIONS
]


@pytest.mark.parametrize("table", TABLES)
def test_recipe_that_a_page_shows_is_valid(table):
    recipe_from_dict(table)
