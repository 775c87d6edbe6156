"""torch.distributed.pipelining: a Llama in stages, whose schedules, cuts and faults nobody told nxd-parity of."""

import pytest
from foreign_programs import pipelining
from foreign_programs.cases import cases

LAYOUTS = {
    "gpipe": (2, {}),
    "1f1b-of-4": (4, {"schedule": "1f1b"}),
    "interleaved": (2, {"schedule": "interleaved"}),
    "zero-bubble": (2, {"schedule": "zb"}),
    "traced": (2, {"cut": "trace"}),
    "traced-in-4": (4, {"cut": "trace", "schedule": "1f1b"}),
    "tied": (2, {"tied": True}),
}
QUICK = {("gpipe", "float64"), ("interleaved", "float64")}


@pytest.mark.parametrize(("layout", "dtype"), cases(LAYOUTS, QUICK))
def test_stages_equal_one_process(compared, layout, dtype):
    ranks, given = LAYOUTS[layout]

    report = compared(pipelining.train, ranks, dtype, reference={"tied": layout == "tied"}, **given)

    assert report.agrees, str(report)
    assert report.agree["gradient"] == 2 * (58 if layout == "tied" else 59)
    assert report.agree["activation"] == 2 * 67
    assert ("names of ranks" in "".join(report.notes)) == (given.get("cut") != "trace")


FAULTS = {
    "layer": ({}, (0, "parameter", "layers.7", "module not called")),  # a stage is a layer too early
    "order": ({"schedule": "1f1b"}, (1, "loss", "", "different data")),  # microbatches get the labels of others
    "scale": ({}, (1, "gradient", "", "scaled")),  # a sum over the microbatches instead of their mean
    "clip": ({"schedule": "interleaved"}, (1, "gradient norm", "", "missing sum")),  # by the norm of a rank
    "tied": ({"tied": True}, (1, "gradient", "embedding.weight", "missing sum")),  # each stage has its own gradient
    "unused": ({}, (1, "gradient", "layers.5.down.weight", "missing term")),  # a block's gradients get lost
}


@pytest.mark.parametrize(("fault", "dtype"), cases(FAULTS, {("clip", "float64")}))
def test_fault_of_stages_is_located(compared, fault, dtype):
    given, expected = FAULTS[fault]

    first = compared(pipelining.train, 2, dtype, reference={"tied": fault == "tied"}, fault=fault, **given).first

    assert first is not None
    assert (first.step, first.kind, first.name, first.fault) == expected
