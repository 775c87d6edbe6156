"""What the packages cost: modules imported beyond torch's, and distributions installed beyond torch's."""

import json
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement

PACKAGES = [
    "nxd_state",
    "nxd_layers",
    "nxd_optim",
    "nxd_pipeline",
    "nxd_ckpt",
    "nxd_trace",
    "nxd_lora",
    "nxd_data",
    "nxd_parity",
    "nxd_engine",
    "nxd_trainer",
    "neuronx_distributed",
]
MODULES_OF_TORCH = "import torch, torch.distributed"
USES = {
    "nxd.parallel_state.get_tensor_model_parallel_size": ["nxd_layers", "nxd_optim", "nxd_pipeline", "nxd_ckpt"],
    "nxd.parallel_layers.ColumnParallelLinear": ["nxd_pipeline", "nxd_ckpt"],
    "nxd.pipeline.NxDPPModel": ["nxd_layers", "nxd_optim", "nxd_ckpt"],
    "nxd.initialize_parallel_model": ["nxd_lightning", "nxd_trace", "transformers", "peft", "tensorboard"],
}
# Reads statements, a line each, and runs each in a fork of its own, so that torch is loaded once for all of them.
LISTER = """
import json, os, sys
exec(sys.argv[1])
for statement in sys.stdin.read().splitlines():
    sys.stdout.flush()
    if os.fork() == 0:
        exec(statement)
        print(json.dumps([statement, sorted(sys.modules)]))
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
MOST_DISTRIBUTIONS = 11


def modules_after(python: str, first: str, statements: list[str]) -> dict[str, set[str]]:
    """By statement, the modules that an interpreter has after `first` and it."""
    output = subprocess.run(
        [python, "-c", LISTER, first], input="\n".join(statements), capture_output=True, text=True, check=True
    ).stdout
    return {statement: set(names) for statement, names in map(json.loads, output.splitlines())}


@pytest.fixture(scope="module")
def after_torch(fresh_python: str) -> dict[str, set[str]]:
    """By statement, the modules beside those of torch, which are loaded before."""
    return modules_after(fresh_python, MODULES_OF_TORCH, ["pass", *(f"import {package}" for package in PACKAGES)])


def modules_of(python: str, statement: str) -> set[str]:
    """The modules of an interpreter that has loaded nothing before."""
    return modules_after(python, "pass", [statement])[statement]


def top_level(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


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
def test_import_adds_only_the_packages_own_modules_to_torchs(after_torch, package):
    added = top_level(after_torch[f"import {package}"]) - top_level(after_torch["pass"]) - set(sys.stdlib_module_names)

    own = {name for name in added if name.startswith("nxd_") or name == "neuronx_distributed"}
    assert own
    assert added - own <= {"xxhash", "safetensors", "__mp_main__"}


@pytest.mark.parametrize("package", PACKAGES)
def test_import_leaves_out_the_parts_of_torch_that_take_long(after_torch, package):
    taking_long = {"torch.distributed.checkpoint", "torch.distributed.tensor", "torch._inductor"}

    assert not taking_long & after_torch[f"import {package}"]


def test_import_name_is_free_until_it_is_used(fresh_python):
    """What costs nothing needs no clock: neither torch nor any of our packages but the one that looks who owns it."""
    imported = top_level(modules_of(fresh_python, "import neuronx_distributed"))

    assert "torch" not in imported
    assert {name for name in imported if name.startswith("nxd_")} == {"nxd_neuronx"}


@pytest.mark.sample(2)
@pytest.mark.parametrize("use", USES)
def test_documented_name_brings_in_only_the_packages_behind_it(fresh_python, use):
    imported = top_level(modules_of(fresh_python, f"import neuronx_distributed as nxd; {use}"))

    assert not imported & set(USES[use])


def test_command_line_answers_without_torch(fresh_python):
    assert "torch" not in modules_of(fresh_python, "import nxd_cli")


def test_full_stack_brings_few_distributions():
    found = distributions("nxd-trainer") - distributions("torch")
    beyond_torch = {name for name in found if not name.startswith("nxd-")}

    assert len(beyond_torch) <= MOST_DISTRIBUTIONS, sorted(beyond_torch)
