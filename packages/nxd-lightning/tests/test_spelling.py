"""Which Lightning the classes inherit from, and what happens when the other one is mixed in."""

import subprocess
import sys

import pytest
from nxd_testing import deadline

MAKE = "import nxd_lightning as nl; strategy = nl.NeuronXLAStrategy()"


def run(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=deadline(300), check=False
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("lightning", "lightning.pytorch"),
        ("pytorch_lightning", "pytorch_lightning"),
        ("nxd_lightning", "lightning.pytorch"),
    ],
)
def test_classes_inherit_from_the_lightning_that_is_imported_first(first, expected):
    result = run(f"import {first}; {MAKE}; print(type(strategy).__mro__[1].__module__)")

    assert result.stdout.strip() == f"{expected}.strategies.ddp", result.stderr


def test_importing_the_package_does_not_import_lightning():
    result = run("import nxd_lightning, sys; print('lightning' in sys.modules, 'pytorch_lightning' in sys.modules)")

    assert result.stdout.split() == ["False", "False"], result.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "mixed",
    [
        "other.Trainer(accelerator='cpu', strategy=strategy)",
        "own.Trainer(accelerator='cpu', strategy=strategy, callbacks=[other.callbacks.Timer()], barebones=True)"
        ".fit(nl.NeuronLTModule(torch.nn.Linear, {}, torch.optim.SGD, model_args=(2, 2)), [torch.ones(1, 2)])",
    ],
    ids=["strategy", "callback"],
)
def test_classes_of_the_other_lightning_are_refused_with_advice(mixed):
    result = run(f"import torch; import lightning.pytorch as own; {MAKE}; import pytorch_lightning as other; {mixed}")

    assert result.returncode != 0
    assert "import pytorch_lightning before nxd_lightning" in result.stderr
