"""The commands of `nxd`: found by entry points, listed without being loaded, and told how to install."""

import sys
import tomllib
from pathlib import Path

import pytest
from nxd_cli import main
from nxd_cli.dispatch import COMMANDS, GROUP

PACKAGES = Path(__file__).parents[2]

pytestmark = pytest.mark.smoke


@pytest.fixture
def other_package(tmp_path, monkeypatch):
    """A distribution with the command `hello`, whose module says that it was loaded."""
    folder = tmp_path / "other-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\nSummary: says hello\n")
    (folder / "entry_points.txt").write_text(f"[{GROUP}]\nhello = hello_of_another:main\n")
    (tmp_path / "hello_of_another.py").write_text(
        "def main(arguments):\n    print('hello', *arguments)\n    return 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("hello_of_another", None)


def test_command_of_another_package_is_listed_unloaded_and_run(other_package, capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])

    assert end.value.code == 0
    assert "says hello" in capsys.readouterr().out
    assert "hello_of_another" not in sys.modules
    assert main(["hello", "--to", "you"]) == 7
    assert capsys.readouterr().out == "hello --to you\n"


@pytest.mark.usefixtures("other_package")
def test_known_command_whose_package_is_missing_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("nxd_cli.dispatch.installed_commands", dict)

    with pytest.raises(SystemExit) as end:
        main(["plan", "--top", "3"])

    assert end.value.code == 2
    assert capsys.readouterr().err == "nxd plan: needs nxd-plan, which is not installed; pip install nxd-plan\n"


@pytest.mark.skipif(not (PACKAGES / "nxd-trainer").exists(), reason="only nxd-cli is here")
def test_catalog_names_the_package_that_brings_each_command():
    brought = {
        name: path.parent.name
        for path in PACKAGES.glob("*/pyproject.toml")
        for name in tomllib.loads(path.read_text())["project"].get("entry-points", {}).get(GROUP, {})
    }

    assert {name: it.package for name, it in COMMANDS.items()} == brought
