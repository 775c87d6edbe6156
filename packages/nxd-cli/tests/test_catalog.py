"""The commands of `nxd`: found by entry points, listed without being loaded, and told how to install."""

import platform
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
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

    assert main(["plan", "--top", "3"]) == 2
    assert capsys.readouterr().err == "nxd plan: needs nxd-plan, which is not installed; pip install nxd-plan\n"


@pytest.mark.usefixtures("other_package")
def test_unknown_command_gets_the_nearest_as_a_hint(capsys):
    assert main(["helo"]) == 2
    assert capsys.readouterr().err == "nxd helo: there is no such command; did you mean nxd hello?\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise ModuleNotFoundError('', name='torch')", "nxd hello: torch is not installed: pip install torch"),
        (
            "import module_of_nobody",
            "nxd hello: needs the module module_of_nobody, which is not installed; pip install other installs it",
        ),
        ("raise OSError('libcudart.so: cannot open')", "nxd hello: cannot be loaded: OSError: libcudart.so"),
        (
            "def main(arguments):\n    raise ModuleNotFoundError('', name='torch')",
            "nxd hello: torch is not installed: pip install torch",
        ),
    ],
    ids=["no torch", "no other module", "no library", "no torch for the call"],
)
def test_command_that_lacks_a_module_is_one_line_that_says_what_to_install(
    other_package, tmp_path, capsys, source, expected
):
    (tmp_path / "hello_of_another.py").write_text(source)

    code = main(["hello"])

    told = capsys.readouterr().err
    assert (code, len(told.splitlines())) == (2, 1)
    assert told.startswith(expected)


@pytest.mark.usefixtures("other_package")
def test_command_with_a_torch_that_is_too_old_names_the_supported_releases(monkeypatch, capsys):
    monkeypatch.setattr("nxd_cli.installation.installed_versions", lambda names: {"torch": "2.8.0+cu126"})

    assert main(["hello"]) == 2
    assert capsys.readouterr().err == (
        "nxd hello: torch 2.8.0+cu126 is too old; nxd needs torch 2.9 to 2.15: pip install 'torch>=2.9'\n"
    )


def test_command_that_is_interrupted_ends_with_130(other_package, tmp_path, capsys):
    (tmp_path / "hello_of_another.py").write_text("def main(arguments):\n    raise KeyboardInterrupt")

    assert main(["hello"]) == 130
    assert capsys.readouterr().err == "nxd hello: interrupted\n"


def test_help_of_a_command_is_also_asked_for_in_front_of_it(other_package, capsys):
    assert main(["help", "hello"]) == 7
    assert capsys.readouterr().out == "hello --help\n"
    with pytest.raises(SystemExit):
        main(["help"])
    assert "says hello" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version_lists_packages_torch_and_python(capsys, flag):
    with pytest.raises(SystemExit) as end:
        main([flag])

    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 0
    assert f"nxd-cli {version('nxd-cli')}" in lines
    assert lines[-2:] == [f"torch {version('torch')}", f"python {platform.python_version()}"]


@pytest.mark.skipif(not shutil.which("bash"), reason="completes in bash")
def test_completion_script_for_bash_completes_commands_and_flags(other_package, tmp_path, capsys):
    (tmp_path / "hello_of_another.py").write_text(
        "from nxd_cli.command import make_parser, parse\n"
        "def main(arguments):\n"
        "    parser = make_parser('hello', 'Say hello.', examples=['nxd hello --greeting.text x'])\n"
        "    parser.add_argument('--greeting.text')\n"
        "    parse(parser, arguments)\n"
    )
    with pytest.raises(SystemExit):
        main(["--print-completion", "bash"])
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        typed = " ".join(f"'{word}'" for word in ("nxd", *words))
        asked = f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _shtab_nxd; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", f"source {script}; {asked}"], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert completed("hel") == ["hello"]
    assert completed("hello", "--gr") == ["--greeting.text"]


@pytest.mark.usefixtures("other_package")
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_scripts_for_other_shells_know_the_command(capsys, tmp_path, shell):
    (tmp_path / "hello_of_another.py").write_text(
        "import argparse\ndef main(arguments):\n    argparse.ArgumentParser().parse_args(arguments)\n"
    )

    with pytest.raises(SystemExit) as end:
        main(["--print-completion", shell])

    assert end.value.code == 0
    assert "hello" in capsys.readouterr().out


@pytest.mark.skipif(not (PACKAGES / "nxd-trainer").exists(), reason="only nxd-cli is here")
def test_catalog_names_the_package_that_brings_each_command():
    brought = {
        name: path.parent.name
        for path in PACKAGES.glob("*/pyproject.toml")
        for name in tomllib.loads(path.read_text())["project"].get("entry-points", {}).get(GROUP, {})
    }

    assert {name: it.package for name, it in COMMANDS.items()} == brought
