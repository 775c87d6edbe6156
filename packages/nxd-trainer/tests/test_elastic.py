"""Recipes that an elastic training refuses."""

import pytest
from nxd_elastic.loop import Options
from nxd_trainer.recipe import load_recipe
from nxd_trainer.training.elastic import ElasticRecipe


def test_recipe_that_never_resumes_is_refused():
    with pytest.raises(ValueError, match="would restart the run from scratch whenever a rank is lost"):
        ElasticRecipe(load_recipe(None, ["checkpoint.resume=never"]), [], Options(1, 2))
