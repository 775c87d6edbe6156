"""What the packages cost: modules imported beyond torch's, and distributions installed beyond torch's."""

import json
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.usefixtures("fresh_interpreter")

PACKAGES = [
    "nxd_state",
    "nxd_layers",
    "nxd_optim",
    "nxd_pipeline",
    "nxd_ckpt",
    "nxd_trace",
    "nxd_trainer",
    "nxd_trainer.api",
    "neuronx_distributed",
]
MODULES_OF_TORCH = "import torch, torch.distributed"
LISTING = "import sys, json; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
MOST_DISTRIBUTIONS = 16


def imported_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after `statement`."""
    output = subprocess.run(
        [sys.executable, "-c", f"{statement}; {LISTING}"], capture_output=True, text=True, check=True
    )
    return set(json.loads(output.stdout))


def distributions(name: str) -> set[str]:
    """A distribution and all that it needs, without extras."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_import_adds_only_the_packages_own_modules_to_torchs(package):
    with_torch = imported_after(MODULES_OF_TORCH)
    standard_library = set(sys.stdlib_module_names)

    added = imported_after(f"{MODULES_OF_TORCH}; import {package}") - with_torch - standard_library

    own = {name for name in added if name.startswith("nxd_") or name == "neuronx_distributed"}
    assert added - own <= {"xxhash", "safetensors", "__mp_main__"}


@pytest.mark.parametrize("package", PACKAGES)
def test_import_leaves_out_the_parts_of_torch_that_take_long(package):
    listing = "import sys; print(' '.join(sys.modules))"
    statement = f"{MODULES_OF_TORCH}; import {package}; {listing}"
    output = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=True).stdout

    assert not {"torch.distributed.checkpoint", "torch.distributed.tensor", "torch._inductor"} & set(output.split())


def test_import_name_is_free_until_it_is_used():
    """What costs nothing needs no clock: neither torch nor any of our packages but the one that looks who owns it."""
    imported = imported_after("import neuronx_distributed")

    assert "torch" not in imported
    assert {name for name in imported if name.startswith("nxd_")} == {"nxd_trainer"}


@pytest.mark.parametrize(
    ("use", "spared"),
    [
        ("nxd.parallel_state.get_tensor_model_parallel_size", ["nxd_layers", "nxd_optim", "nxd_pipeline", "nxd_ckpt"]),
        ("nxd.parallel_layers.ColumnParallelLinear", ["nxd_pipeline", "nxd_ckpt"]),
        ("nxd.pipeline.NxDPPModel", ["nxd_layers", "nxd_optim", "nxd_ckpt"]),
        ("nxd.initialize_parallel_model", ["nxd_lightning", "nxd_trace", "transformers", "peft", "tensorboard"]),
    ],
)
def test_documented_name_brings_in_only_the_packages_behind_it(use, spared):
    imported = imported_after(f"import neuronx_distributed as nxd; {use}")

    assert not imported & set(spared)


def test_command_line_answers_without_torch():
    assert "torch" not in imported_after("import nxd_trainer.cli")


def test_full_stack_brings_few_distributions():
    beyond_torch = distributions("nxd-trainer") - distributions("torch")

    assert len(beyond_torch) <= MOST_DISTRIBUTIONS, sorted(beyond_torch)
