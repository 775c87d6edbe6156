"""`nxd parity`, in one process: where its case comes from, what it prints and its exit codes."""

import json
import subprocess
import sys

import pytest
from nxd_cli import main
from nxd_state import destroy_model_parallel

CASES = """
import torch
from torch import nn
from nxd_trainer.parity import ParityCase

def model(bias=0.0):
    made = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.no_grad():
        made[2].bias += bias
    return Mean(made)

class Mean(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).square().mean()

BATCHES = [{"x": torch.linspace(-1, 1, 12).view(4, 3)}]

def right():
    return ParityCase(model_fn=model, batches=BATCHES, nxd_config={"pipeline_config": {"num_microbatches": 2}})

def wrong():
    return ParityCase(model_fn=model, batches=BATCHES, nxd_config={}, reference_fn=lambda: model(bias=0.5))

def nothing():
    return None
"""


@pytest.fixture(autouse=True)
def cases(tmp_path, monkeypatch):
    """A module `parity_cases` in the current folder, and no mesh afterwards."""
    (tmp_path / "parity_cases.py").write_text(CASES)
    (tmp_path / "parity_broken.py").write_text("def right(:")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    yield
    destroy_model_parallel()


def test_function_that_agrees_ends_with_0_and_one_that_does_not_with_3(capsys):
    assert main(["parity", "parity_cases:right"]) == 0
    capsys.readouterr()

    assert main(["parity", "parity_cases:wrong", "--dtype", "float32"]) == 3

    shown = capsys.readouterr().out
    assert "DIFFERENT  step 0, parameter, inner.2.bias: different values" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parity_cases:nothing"], "parity_cases:nothing() returned a NoneType"),
        (["parity_cases:missing"], "parity_cases:missing cannot be imported from here"),
        (["no_such_module:right"], "no_such_module:right cannot be imported from here"),
        (
            ["parity_cases:right", "train.steps=3"],
            "train.steps=3 is a recipe key, but parity_cases:right is not a recipe",
        ),
        (["parity_cases:BATCHES"], "parity_cases:BATCHES is a list; pass a function"),
        (["parity_broken:right"], "parity_broken:right cannot be imported from here: SyntaxError: invalid syntax"),
        (["parity_cases:right", "--rtol", "nan"], "rtol=nan is out of range"),
        (["parity_cases:right", "--resume-at", "1"], "resume_at=1 leaves none of 1 steps to compare"),
    ],
)
def test_case_that_is_none_is_a_mistake(capsys, arguments, message):
    assert main(["parity", *arguments]) == 2

    assert message in capsys.readouterr().err


def test_report_is_written_in_the_forms_that_are_asked_for(capsys, tmp_path):
    assert main(["parity", "parity_cases:wrong", "--json", "--html", "page.html", "--markdown", "summary.md"]) == 3

    assert json.loads(capsys.readouterr().out)["findings"][0]["name"] == "inner.2.bias"
    assert "inner.2.bias" in (tmp_path / "page.html").read_text()
    assert "inner.2.bias" in (tmp_path / "summary.md").read_text()


@pytest.mark.usefixtures("fresh_interpreter")
def test_help_does_not_load_torch():
    asks = "import sys; from nxd_cli import main; main(['parity', '--help'])"
    code = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {asks}"

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ended.stdout.endswith("\nFalse\n")
    assert "--resume-at" in ended.stdout
