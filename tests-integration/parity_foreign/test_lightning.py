"""Lightning's own strategies: DDP in all the ways that it starts ranks, FSDP2 and tensor parallelism."""

import json
import shlex
from pathlib import Path

import pytest
from foreign_programs import lightning_trainer
from foreign_programs.cases import cases
from foreign_programs.launched import as_launched
from nxd_parity.command import main

PROGRAM = Path(lightning_trainer.__file__)


def train(**given):
    """Train as torchrun would start the program."""
    with as_launched():
        lightning_trainer.train(**given)


@pytest.mark.parametrize(("strategy", "dtype"), cases(["ddp", "fsdp2", "tp"], {("ddp", "float64")}))
def test_strategy_equals_one_process(compared, strategy, dtype):
    clip = 0.5 if strategy == "ddp" else None  # the others cannot clip

    report = compared(train, 2, dtype, reference={"clip": clip}, strategy=strategy, clip=clip)

    assert report.agrees, str(report)
    assert report.agree["gradient"] == 2 * 11
    assert not [it for it in report.not_compared if "parameter" in it or it.endswith("loss")]


FAULTS = {
    "rows": ("ddp", [("input", "", "different data")]),  # Lightning's sampler shuffles on several ranks only
    "sum": ("ddp", [("gradient", "", "summed twice")]),  # the loss is multiplied by the ranks, which DDP averages
    "reduced again": ("ddp", [("gradient", "", "summed twice")]),  # by the program after DDP
    # what the layer gives to the next module is its part of a sum
    "row": ("tp", [("activation", f"blocks.0.{it}", "missing sum") for it in ("down", "dropout")]),
}


@pytest.mark.parametrize(("fault", "dtype"), cases(FAULTS, {("sum", "float64")}))
def test_fault_is_located(compared, fault, dtype):
    strategy, expected = FAULTS[fault]

    first = compared(train, 2, dtype, reference={"clip": None}, strategy=strategy, fault=fault).first

    assert first is not None
    assert first.step == 1
    assert (first.kind, first.name, first.fault) in expected


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_fork", "fsdp2"])
def test_ranks_that_lightning_starts_are_recorded(fresh_python, tmp_path, monkeypatch, capfd, strategy):
    monkeypatch.chdir(tmp_path)
    command = f"{shlex.quote(fresh_python)} {shlex.quote(str(PROGRAM))}"

    programs = ["--reference", command, "--candidate", f"{command} --strategy {strategy}"]
    exit_code = main(["run", "--steps", "2", "--float64", "--json", *programs])

    report = json.loads(capfd.readouterr().out)
    assert (exit_code, report["ranks"], report["steps"]) == (0, 2, 2), report
    assert report["agree"]["gradient"] == 2 * 11
