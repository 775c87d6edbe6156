"""transformers' Llama under torch's `parallelize_module`: tensor, sequence and loss parallel, and wrong plans."""

import pytest
from foreign_programs import dtensor_llama
from foreign_programs.cases import cases

LAYOUTS = {
    "sequence": {},
    "loss": {"is_loss_split": True},
    "tied": {"is_tied": True},
}
QUICK = {("loss", "float64"), ("output not summed", "float64")}
KNOWN = {
    ("norm gradient not summed", "bfloat16"): "is not seen: the difference is within the spread",
    ("output not summed", "bfloat16"): "is not seen: what follows is within the spread, so it is only noted",
}


@pytest.mark.parametrize(("layout", "dtype"), cases(LAYOUTS, QUICK, KNOWN))
def test_plan_agrees(compared, layout, dtype):
    given = LAYOUTS[layout]
    whole = {"is_tied": True} if "is_tied" in given else {}

    report = compared(dtensor_llama.train, 2, dtype, reference=whole, **given)

    assert report.agrees, str(report)
    assert report.not_compared == {}
    assert report.agree["gradient"] == 2 * (20 if whole else 21)


FAULTS = {
    "norm gradient not summed": (
        {},
        ("gradient", "model.layers.1.post_attention_layernorm.weight", {"missing sum"}),
    ),
    "output not summed": ({}, ("activation", "model.layers.1.mlp.down_proj", {"different values", "missing sum"})),
    "input gradient not summed": ({}, ("activation gradient", "model.layers.1.mlp", {"missing sum"})),
    "loss of each rank summed": ({"is_loss_split": True}, ("loss", "", {"summed twice"})),
    "not tied": ({"is_tied": True}, ("gradient", "model.embed_tokens.weight", {"missing sum"})),
}


@pytest.mark.parametrize(("fault", "dtype"), cases(FAULTS, QUICK, KNOWN))
def test_fault_is_located(compared, fault, dtype):
    given, (kind, name, faults) = FAULTS[fault]
    whole = {"is_tied": True} if "is_tied" in given else {}

    first = compared(dtensor_llama.train, 2, dtype, reference=whole, fault=fault, **given).first

    assert first is not None
    assert (first.step, first.kind, first.name) == (1, kind, name)
    assert first.fault in faults
