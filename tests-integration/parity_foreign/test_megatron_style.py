"""A GPT with hand-written tensor, sequence and data parallelism, and the mistakes that people make in such programs."""

import sys

import pytest
from foreign_programs import megatron_style
from foreign_programs.cases import cases
from nxd_parity.command import main

LAYOUTS = {"tp2": (2, {"tp": 2}), "dp2": (2, {"tp": 1}), "tp2-dp2": (4, {"tp": 2})}
QUICK = {("tp2-dp2", "float64"), ("norm not summed", "float64"), ("bias on every rank", "float64")}
KNOWN = {
    ("bias on every rank", "bfloat16"): "is seen at the gradient of the bias: its part of the output is within rounding"
}


@pytest.mark.parametrize(("layout", "dtype"), cases(LAYOUTS, QUICK, KNOWN))
def test_program_agrees(compared, layout, dtype):
    ranks, given = LAYOUTS[layout]

    report = compared(megatron_style.train, ranks, dtype, **given)

    assert report.agrees, str(report)
    assert report.not_compared == {}
    assert report.agree["gradient"] == 2 * 29


FAULTS = {
    "norm not summed": (2, ("gradient", "layers.1.mlp_norm.weight", {"missing sum"})),
    "input gradient not summed": (2, ("activation gradient", "layers.1.up", {"missing sum"})),
    "bias on every rank": (2, ("activation", "layers.1.down", {"summed twice"})),
    "qkv split as one matrix": (2, ("input", "layers.1.attention", {"different values", "wrong shard or order"})),
    "averaged twice": (4, ("gradient", "layers.0.down.bias", {"scaled"})),
    "mean over local tokens": (4, ("loss", "", {"wrong averaging"})),
}


@pytest.mark.parametrize(("fault", "dtype"), cases(FAULTS, QUICK, KNOWN))
def test_fault_is_located(compared, fault, dtype):
    ranks, (kind, name, faults) = FAULTS[fault]

    first = compared(megatron_style.train, ranks, dtype, tp=2, fault=fault).first

    assert first is not None
    assert (first.step, first.kind, first.name) == (1, kind, name)
    assert first.fault in faults


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "exit_code"), [("", 0), ("norm not summed", 3)])
def test_commands_are_compared(tmp_path, capsys, fault, exit_code):
    script = megatron_style.__file__
    launch = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 4 {script} --tp 2"
    programs = ["--reference", f"{sys.executable} {script}", "--candidate", f"{launch} --fault '{fault}'"]

    found = main(["run", "--float64", "--folder", str(tmp_path / "run"), *programs])

    printed = capsys.readouterr()
    assert found == exit_code, printed.out + printed.err
    assert ("layers.1.mlp_norm.weight: missing sum" in printed.out) == bool(fault)
