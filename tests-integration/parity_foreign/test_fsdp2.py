"""FSDP2 of a model of transformers: on two and four ranks, as HSDP, and mistakes around it."""

import pytest
from foreign_programs import fsdp2
from foreign_programs.cases import cases

LAYOUTS = {"2": (2, {}), "4": (4, {}), "hsdp": (4, {"replicas": 2})}
QUICK = {("2", "float64"), ("a weight ignored", "float64")}
CANNOT_SCALE = "gloo cannot scale what FSDP2 adds up but in float64"
KNOWN = {
    ("a layer not averaged", "float32"): CANNOT_SCALE,
    ("a layer not averaged", "bfloat16"): CANNOT_SCALE,
    ("mean over a rank's own tokens", "bfloat16"): "is seen in the weights after the step, not in the loss",
}


@pytest.mark.parametrize(("layout", "dtype"), cases(LAYOUTS, QUICK, KNOWN))
def test_sharded_model_agrees(compared, layout, dtype):
    ranks, given = LAYOUTS[layout]

    report = compared(fsdp2.train, ranks, dtype, **given)

    assert report.agrees, str(report)
    assert report.not_compared == {}
    assert report.agree["gradient"] == 2 * 21


FAULTS = {
    "a layer not averaged": ("gradient", "model.layers.1.mlp.down_proj.weight", {"summed twice"}),
    "a weight ignored": ("gradient", "model.layers.1.input_layernorm.weight", {"missing sum"}),
    "mean over a rank's own tokens": ("loss", "", {"wrong averaging"}),
    "equal batches": ("input", "", {"different data"}),
}


@pytest.mark.parametrize(("fault", "dtype"), cases(FAULTS, QUICK, KNOWN))
def test_fault_is_located(compared, fault, dtype):
    kind, name, faults = FAULTS[fault]

    first = compared(fsdp2.train, 2, dtype, fault=fault).first

    assert first is not None
    assert (first.step, first.kind, first.name) == (1, kind, name)
    assert first.fault in faults
