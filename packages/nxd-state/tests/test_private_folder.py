"""Folders for compiled code: what another user of the machine has prepared is never used."""

import os
from pathlib import Path

import pytest
from nxd_state import keep_compiled_code_private, private_folder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
STRANGER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folders")


@pytest.fixture
def home(monkeypatch, tmp_path) -> Path:
    for name in (VARIABLE, "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_compiled_code_without_a_variable_lies_in_a_folder_of_the_user(home):
    keep_compiled_code_private()

    folder = Path(os.environ[VARIABLE])
    assert folder.is_relative_to(home)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_compiled_code_whose_cache_folder_is_open_lies_in_a_temporary_folder_of_the_user(home):
    (home / "nxd").mkdir(parents=True)
    (home / "nxd").chmod(0o777)

    keep_compiled_code_private()

    folder = Path(os.environ[VARIABLE])
    assert not folder.is_relative_to(home)
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (os.geteuid(), 0o700)


@pytest.mark.parametrize("name", [VARIABLE, "TRITON_CACHE_DIR"])
def test_folder_of_a_variable_that_others_can_write_to_is_refused(home, monkeypatch, tmp_path, name):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv(name, str(tmp_path / "open"))

    with pytest.raises(PermissionError, match=f"{name}: other users can write to .*open.* or unset {name}"):
        keep_compiled_code_private()


def test_folder_below_one_that_others_can_write_to_is_refused_unless_it_is_sticky(tmp_path):
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o1777)
    assert private_folder(above / "own").is_dir()

    above.chmod(0o777)
    with pytest.raises(PermissionError, match=r"put their own folder in place of .*own"):
        private_folder(above / "own")


@needs_root
@pytest.mark.parametrize("way", ["folder", "above", "link"])
def test_folder_that_another_user_made_first_is_refused(tmp_path, way):
    planted = tmp_path / "planted"
    (planted / "own").mkdir(parents=True)
    os.chown(planted, STRANGER, STRANGER)
    (tmp_path / "link").symlink_to(planted)

    with pytest.raises(PermissionError, match=r"belongs to user 54321|in place of"):
        private_folder({"folder": planted, "above": planted / "own", "link": tmp_path / "link"}[way])
