"""`nxd` without arguments: what the machine has, and the command to type next in this folder."""

import json
import subprocess
from pathlib import Path

import pytest
from nxd_cli import main
from nxd_cli.overview import next_commands

pytestmark = pytest.mark.smoke

RECIPE = "[parallel]\ntensor_parallel_size = 2\npipeline_parallel_size = 2\n[train]\nsteps = 10\n"


def write_run(folder: Path, *, step: int) -> None:
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "metrics.jsonl").write_text(f"{json.dumps({'step': 1})}\n{json.dumps({'step': step})}\n")


def commands_in(folder: Path) -> list[str]:
    return [command for command, _ in next_commands(folder)]


def test_overview_shows_devices_packages_commands_and_the_next_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SystemExit) as end:
        main([])

    told = capsys.readouterr().out
    assert end.value.code == 0
    assert "CPU core" in told
    assert "nxd-cli" in told
    assert "  train       " in told
    assert "  nxd COMMAND --help" in told


def test_overview_is_made_without_torch(fresh_python, tmp_path):
    program = "import sys; sys.modules['torch'] = None; from nxd_cli import main; main([])"  # its import now fails

    done = subprocess.run([fresh_python, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert "commands:" in done.stdout


def test_folder_without_recipe_is_offered_init(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    (tmp_path / "broken.toml").write_text("[train")

    assert commands_in(tmp_path) == ["nxd init", "nxd doctor"]


def test_recipe_is_offered_to_train_on_the_ranks_that_it_needs(tmp_path):
    (tmp_path / "my recipe.toml").write_text(RECIPE)

    assert commands_in(tmp_path)[:2] == ["nxd data 'my recipe.toml'", "nxd train 'my recipe.toml' --nproc 4"]


def test_recipe_is_offered_to_train_on_the_ranks_that_its_first_line_names(tmp_path):
    (tmp_path / "recipe.toml").write_text(f"# nxd train recipe.toml --nproc 8\n{RECIPE}")

    assert commands_in(tmp_path)[1] == "nxd train recipe.toml --nproc 8"


def test_unfinished_run_is_offered_to_resume(tmp_path):
    write_run(tmp_path / "runs" / "a", step=4)

    command, meaning = next_commands(tmp_path)[0]

    assert command == "nxd train runs/a/recipe.toml --nproc 4"
    assert meaning == "resume the run in runs/a, at step 4 of 10"


@pytest.mark.parametrize(
    ("environment", "flag"),
    [
        ({"ranks": 8, "launcher": "nxd --nproc"}, " --nproc 8"),
        ({"ranks": 8, "launcher": "torchrun"}, " --nproc 4"),
        (7, " --nproc 4"),
    ],
)
def test_run_is_resumed_on_the_ranks_that_it_had(tmp_path, environment, flag):
    write_run(tmp_path / "run", step=4)
    (tmp_path / "run" / "events.jsonl").write_text(
        json.dumps({"event": "start", "environment": environment}) + '\n{"event": "warning"}\n{"ev'
    )

    assert commands_in(tmp_path)[0] == f"nxd train run/recipe.toml{flag}"


def test_finished_run_of_conversations_is_offered_to_chat(tmp_path):
    write_run(tmp_path / "run", step=10)
    (tmp_path / "run" / "recipe.toml").write_text(f"{RECIPE}[data]\nchat = true\n")

    assert commands_in(tmp_path)[0] == "nxd generate run --chat"


def test_finished_run_is_offered_to_generate_and_report(tmp_path):
    write_run(tmp_path / "run", step=10)

    assert commands_in(tmp_path)[:2] == ["nxd generate run", "nxd report run"]


@pytest.mark.parametrize("last", [b"", b'{"step": ', b"\xff", b"[]", b'{"step": 1e999}'])
def test_run_whose_metrics_are_damaged_is_offered_all_the_same(tmp_path, last):
    write_run(tmp_path / "run", step=3)
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(last)

    assert next_commands(tmp_path)[0][1] == "resume the run in run, at step 3 of 10"
