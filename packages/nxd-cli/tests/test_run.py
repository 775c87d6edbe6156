"""`nxd run` without the packages that prepare a script's process."""

import pytest
from nxd_cli import run
from nxd_cli.command import UserError


@pytest.fixture(autouse=True)
def _nothing_is_installed(monkeypatch):
    monkeypatch.setattr(run, "entry_points", lambda group: [])


def test_layout_says_what_to_install(tmp_path):
    script = tmp_path / "train.py"
    script.touch()

    with pytest.raises(UserError, match=r"--zero-stage: a layout needs nxd-hf-trainer.*pip install nxd-hf-trainer"):
        run.main(["--zero-stage", "1", str(script)])


def test_script_without_a_layout_runs_with_its_arguments(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("import sys; print(__name__, sys.argv[1:])")

    assert run.main([str(script), "--zero-stage", "1"]) == 0

    assert capsys.readouterr().out == "__main__ ['--zero-stage', '1']\n"


def test_script_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.py is not a file"):
        run.main([str(tmp_path / "nothing.py")])
