"""Recipes that an elastic training refuses, and where the memory of a host lies."""

import os

import pytest
from nxd_ckpt.peers.keeper import SECRET
from nxd_trainer.elastic.loop import Options
from nxd_trainer.elastic.memory import HostMemory
from nxd_trainer.elastic.processes import Process
from nxd_trainer.elastic.recipes import ElasticRecipe
from nxd_trainer.launch import PEERS_SECRET
from nxd_trainer.recipe import load_recipe


def test_recipe_that_never_resumes_is_refused():
    with pytest.raises(ValueError, match="would begin the run anew whenever a rank is lost"):
        ElasticRecipe(load_recipe(None, ["checkpoint.resume=never"]), [], Options(1, 2))


def test_launcher_gives_the_secret_by_the_name_that_keepers_read():
    assert PEERS_SECRET == SECRET


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no memory to keep files in")
def test_memory_of_another_namespace_is_not_removed_and_that_of_an_ended_launcher_is(monkeypatch, tmp_path):
    monkeypatch.setattr("nxd_trainer.elastic.memory._MEMORY", tmp_path)
    monkeypatch.setattr("nxd_trainer.elastic.memory._own_address", lambda: "127.0.0.1")
    monkeypatch.setenv(SECRET, "of the test")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    own = "".join(filter(str.isdecimal, Process.of(os.getpid()).place.rpartition("/")[2]))
    elsewhere, ended = (tmp_path / f"nxd-memory-{os.getuid()}-{it}-999999-1" for it in ("123", own))
    elsewhere.mkdir()
    ended.mkdir()

    memory = HostMemory()
    memory.close(forget=True)

    assert [it.name for it in tmp_path.iterdir()] == [elsewhere.name]
