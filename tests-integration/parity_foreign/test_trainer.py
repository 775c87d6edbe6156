"""transformers' Trainer under DDP: gradient accumulation, labels of unequal counts per rank, LoRA."""

import pytest
from foreign_programs import trainer
from foreign_programs.cases import cases
from foreign_programs.launched import as_launched_for_accelerate


def train(**given):
    """Train as torchrun would start the program."""
    with as_launched_for_accelerate():
        trainer.train(**given)


@pytest.mark.parametrize(("model", "dtype"), cases(["llama", "lora"], {("llama", "float64")}))
def test_ranks_equal_one_process(compared, model, dtype):
    report = compared(train, 2, dtype, reference={"lora": model == "lora"}, lora=model == "lora")

    assert report.agrees, str(report)
    assert report.agree["gradient"] == 2 * (8 if model == "lora" else 21)
    assert not [it for it in report.not_compared if "gradient" in it or "parameter" in it]


@pytest.mark.parametrize(("plugin", "dtype"), cases(["fsdp2"], set()))
def test_fsdp2_equals_one_process(compared, plugin, dtype):
    report = compared(train, 2, dtype, reference={"lora": False}, fsdp=plugin == "fsdp2")

    assert report.agrees, str(report)
    assert report.agree["gradient"] == 2 * 21


FAULTS = {
    # below float64 a loss may differ too little where gradients do not
    "mean": [("loss", "", "wrong averaging"), ("gradient", "", "wrong averaging")],  # of microbatches of other counts
    "own tokens": [
        ("loss", "", "wrong averaging"),
        ("gradient", "", "wrong averaging"),
    ],  # and of ranks of other counts
    "past ddp": [("gradient", "", "missing sum")],  # the model is called past DDP
    "shuffled": [("input", "", "different data")],  # in an order that depends on the number of ranks
}


@pytest.mark.parametrize(("fault", "dtype"), cases(FAULTS, {("own tokens", "float64")}))
def test_fault_is_located(compared, fault, dtype):
    first = compared(train, 2, dtype, reference={"lora": False}, fault=fault).first

    assert first is not None
    assert first.step == 1
    assert (first.kind, first.name, first.fault) in FAULTS[fault]
