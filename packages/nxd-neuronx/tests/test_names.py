"""Every public name of NeuronX Distributed (release 2.29).

`upstream_names.txt` lists them: `module: name name ...`, continued on indented lines; `(top)` is the package itself.
"""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from nxd_neuronx.unsupported import Unsupported

LIST = Path(__file__).parent / "upstream_names.txt"


def listed():
    module, names = "", {}
    for line in LIST.read_text(encoding="utf-8").splitlines():
        head, _, rest = line.partition(":") if not line.startswith(" ") else (module, ":", line)
        module = head
        names.setdefault(module, []).extend(rest.split())
    return names


NAMES = listed()


def module_of(name):
    return importlib.import_module("neuronx_distributed" if name == "(top)" else f"neuronx_distributed.{name}")


@pytest.mark.parametrize("module", NAMES)
def test_each_name_of_a_module_resolves_and_is_public(module):
    found = module_of(module)

    assert [name for name in NAMES[module] if not hasattr(found, name)] == []
    served = {name for name in NAMES[module] if not isinstance(getattr(found, name), Unsupported)}
    assert served <= set(getattr(found, "__all__", ()))


@pytest.mark.parametrize("module", NAMES)
def test_a_name_of_the_old_runtime_explains_itself_in_one_line_when_it_is_called(module):
    found = module_of(module)
    stand_ins = [it for it in (getattr(found, name) for name in NAMES[module]) if isinstance(it, Unsupported)]

    for stand_in in stand_ins:
        with pytest.raises(NotImplementedError, match=r"; use ") as raised:
            stand_in.apply(1, size=2)
        assert stand_in.name in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_module_of_names_that_explain_themselves_has_no_others():
    with pytest.raises(ImportError, match="cannot import name 'read_hol' from"):
        from neuronx_distributed.trace.hlo_utils import read_hol  # noqa: F401


def test_an_unknown_name_says_which_there_are():
    import neuronx_distributed

    with pytest.raises(AttributeError, match=r"no attribute 'TensorBuilder'; there are .*ModelBuilder"):
        _ = neuronx_distributed.TensorBuilder


@pytest.mark.usefixtures("fresh_interpreter")
def test_importing_every_module_brings_in_neither_transformers_nor_lightning_nor_torch_xla():
    modules = [f"neuronx_distributed.{name}" for name in NAMES if name != "(top)"]
    program = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
print(sorted({{'transformers', 'lightning', 'pytorch_lightning', 'torch_xla'}} & sys.modules.keys()))
"""

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_documented_paths_lead_here():
    import neuronx_distributed as nxd
    import nxd_engine as api
    from nxd_engine.checkpoints import shard_files

    for name in ("save_checkpoint", "load_checkpoint", "has_checkpoint", "finalize_checkpoint"):
        assert getattr(nxd, name) is getattr(nxd.trainer, name) is getattr(nxd.trainer.checkpoint, name)
        assert inspect.unwrap(getattr(nxd, name)) is getattr(api, name)
    assert nxd.parallel_layers.save is nxd.parallel_layers.checkpointing.save
    assert inspect.unwrap(nxd.parallel_layers.save) is shard_files.save
    assert inspect.unwrap(nxd.parallel_layers.load) is shard_files.load
    assert nxd.parallel_layers.random.model_parallel_xla_manual_seed.__module__.startswith("nxd_state")
