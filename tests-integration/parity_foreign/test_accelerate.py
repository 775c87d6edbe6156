"""Accelerate: a program that calls `prepare`, `accumulate` and `clip_grad_norm_` itself, with DDP and with FSDP2."""

import json
import shlex

import pytest
from foreign_programs import accelerated
from foreign_programs.cases import cases
from foreign_programs.launched import as_launched_for_accelerate


def train(**given):
    """Train as torchrun would start the program."""
    with as_launched_for_accelerate():
        accelerated.train(**given)


@pytest.mark.parametrize(("plugin", "dtype"), cases(["ddp", "fsdp"], {("ddp", "float64"), ("fsdp", "float64")}))
def test_ranks_equal_one_process(compared, plugin, dtype):
    report = compared(train, 2, dtype, plugin=plugin)

    assert report.agrees, str(report)
    assert report.not_compared == {}
    assert report.agree["gradient"] == 2 * 23
    assert report.agree["activation"] == 2 * 16


FAULTS = {
    "rows": ({}, [("input", "", "different data")]),  # a loader that was not prepared: all ranks have the same rows
    # below float64 a loss may differ too little where gradients do not
    "mean": ({}, [("loss", "", "wrong averaging"), ("gradient", "", "wrong averaging")]),  # of means of other counts
    "divided": ({}, [("loss", "", "scaled")]),  # by the microbatches, though the loss is a mean over all of them
    "unwrapped": ({}, [("gradient", "", "missing sum")]),  # the model is called past DDP
    "local clip": ({"plugin": "fsdp"}, [("gradient norm", "", "missing sum")]),  # by the norm of a rank's shards
}


@pytest.mark.parametrize(("fault", "dtype"), cases(FAULTS, {("rows", "float64"), ("mean", "float64")}))
def test_fault_is_located(compared, fault, dtype):
    given, expected = FAULTS[fault]

    first = compared(train, 2, dtype, fault=fault, **given).first

    assert first is not None
    assert first.step == 1
    assert (first.kind, first.name, first.fault) in expected


@pytest.mark.slow
def test_accelerate_launch_starts_two_ranks_on_the_cpu(fresh_python, tmp_path, monkeypatch, capfd):
    from nxd_parity.command import main

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # as `--cpu` does, which starts one process only
    python, program = shlex.quote(fresh_python), shlex.quote(accelerated.__file__)
    launch = (
        f"{python} -m accelerate.commands.launch --multi_gpu --num_machines 1 --num_processes 2 --main_process_port 0"
    )
    options = ["--float64", "--json", "--folder", str(tmp_path / "recorded")]

    main(["run", *options, "--reference", f"{python} {program}", "--candidate", f"{launch} {program}"])

    report = json.loads(capfd.readouterr().out)
    assert report["findings"] == []
    assert (report["ranks"], report["agree"]["gradient"]) == (2, 2 * 23)
