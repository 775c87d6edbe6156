"""A training script that imports torch_xla runs where it is not installed, and computes what one process does."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from nxd_testing import deadline

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch-xla is installed")

SCRIPT = """
import argparse
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from torch_xla.utils.checkpoint import checkpoint

import neuronx_distributed as nxd
from helper import make_batches

def forward(model, x):
    return model(x * torch.ones(1, device="xla"))

def train(index, flags):
    config = nxd.neuronx_distributed_config(tensor_parallel_size=1)
    xm.set_rng_state(0)
    model = nxd.initialize_parallel_model(config, lambda: torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = pl.MpDeviceLoader(make_batches(xr.global_ordinal(), xr.world_size()), xm.xla_device())
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = checkpoint(forward, model, batch["x"], use_reentrant=False).square().mean()
        loss.backward()
        xm.optimizer_step(optimizer, groups=nxd.parallel_state.get_data_parallel_group(as_list=True))
        mean = xm.all_reduce(xm.REDUCE_SUM, loss.detach(), scale=1 / xr.world_size())
        xm.add_step_closure(lambda step, mean: xm.master_print("step", step, mean.item()), (step, mean))
        xm.master_print("before", step)
    together = xm.all_gather(torch.ones(1, device="xla").to("xla") * xr.global_ordinal())
    part = xm.reduce_scatter(xm.REDUCE_SUM, together, 1.0, 0, xr.world_size())
    assert xm.mesh_reduce("part", part.item(), list) == [2.0 * rank for rank in range(2)] or xr.world_size() == 1
    xm.rendezvous("end")
    xm.save({"w": model.state_dict()["weight"]}, flags.output, global_master=True)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    dist.init_process_group("xla", init_method="pjrt://")
    xmp.spawn(train, args=(parser.parse_args(),))
"""
INFERENCE = """
import argparse
import torch
import torch_neuronx
from neuronxcc.nki.kernels.attention import attention_isa_kernel
from torch_neuronx.xla_impl.ops import RmsNorm, nki_jit

from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear
from neuronx_distributed.trace import ModelBuilder
from neuronx_distributed.trace.model_builder import BaseModelInstance

flash = nki_jit()(attention_isa_kernel)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = ColumnParallelLinear(4, 8, bias=False)
        self.norm = torch.nn.Parameter(torch.ones(8))

    def forward(self, inputs):
        return RmsNorm.apply(self.layer(inputs), self.norm, 1e-6, 1)

def weights():
    torch.manual_seed(0)
    return {"layer.weight": torch.randn(8, 4), "norm": torch.arange(8.0)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    path, inputs = parser.parse_args().output, torch.ones(2, 4)
    builder = ModelBuilder(router=None, tp_degree=2, checkpoint_loader=weights)
    builder.add("main", BaseModelInstance(Model, {}), [(inputs,)], compiler_args="--auto-cast=none")
    traced = builder.trace(initialize_model_weights=False)
    torch.jit.save(traced, path)
    model = torch.jit.load(path)
    assert isinstance(model, torch.jit.ScriptModule)
    model.nxd_model.initialize(builder.shard_checkpoint(), torch.tensor([0]))
    hidden = inputs @ weights()["layer.weight"].t()
    expected = torch.nn.functional.rms_norm(hidden, (8,), weights()["norm"], 1e-6)
    torch_neuronx.testing.assert_close(model(inputs), expected)
    try:
        flash(inputs, inputs, inputs, 1.0, inputs)
    except NotImplementedError as error:
        print(error)
"""
HELPER = """
import torch

def make_batches(rank, world_size):
    batches = torch.arange(3 * 4 * 4.0).view(3, 4, 4) / 48
    return [{"x": batch.chunk(world_size)[rank]} for batch in batches]
"""


@pytest.fixture
def run_script(tmp_path):
    """Writes the script, and returns what runs it by `nxd run` with these arguments."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text(HELPER)

    def run(*arguments, script="script.py"):
        return subprocess.run(
            [sys.executable, "-m", "nxd_cli", "run", *arguments, str(tmp_path / script), "--output", "out.pt"],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=deadline(120),
        )

    return run


def expected_weight_and_losses():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in torch.arange(3 * 4 * 4.0).view(3, 4, 4) / 48:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.weight.detach(), losses


def own_lines(result):
    """What a script printed; torch 2.9's gloo prints lines of its own."""
    return [line for line in result.stdout.splitlines() if not line.startswith("[Gloo]")]


def test_script_for_torch_xla_trains_on_two_ranks_as_one_process_does(tmp_path, run_script):
    result = run_script("--nproc", "2")

    assert result.returncode == 0, result.stderr
    weight, losses = expected_weight_and_losses()
    torch.testing.assert_close(torch.load(tmp_path / "out.pt")["w"], weight)
    lines = [line.split() for line in own_lines(result)]
    # Closures run when the step ends, after what the script prints in it.
    assert [line[:2] for line in lines] == [[word, str(step)] for step in range(3) for word in ("before", "step")]
    torch.testing.assert_close(
        torch.tensor([float(line[2]) for line in lines if line[0] == "step"]), torch.tensor(losses)
    )


@pytest.mark.slow
def test_inference_script_for_torch_neuronx_compiles_saves_loads_and_computes_the_same_in_its_workers(
    tmp_path, run_script, monkeypatch
):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "inference.py").write_text(INFERENCE)

    result = run_script(script="inference.py")

    assert result.returncode == 0, result.stderr
    assert own_lines(result)[0].startswith(
        "neuronxcc.nki.kernels.attention.attention_isa_kernel launches an NKI kernel"
    )


def test_script_that_is_no_file_is_refused(run_script):
    result = run_script("--nproc", "2", script="absent.py")

    assert result.returncode == 2
    assert result.stderr.startswith("nxd run: ")
    assert result.stderr.endswith("absent.py is not a file; pass the Python script to run\n")


def test_name_that_the_stand_in_lacks_is_an_error_that_lists_what_it_has(tmp_path, run_script):
    (tmp_path / "other.py").write_text("import torch_xla.runtime as xr\nxr.use_spmd()\n")

    result = run_script(script="other.py")

    assert result.returncode == 1
    assert "the stand-in for torch_xla.runtime has no 'use_spmd'; it has device_type, " in result.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import torch_xla.core.xla_env_vars", "torch_xla.core has no 'xla_env_vars'; it has xla_model. Use"),
        ("from torch_xla.amp import autocast", "torch_xla has no 'amp'; it has __version__, core, debug, "),
        ("from torch_xla import amp", "torch_xla has no 'amp'; it has __version__, core, debug, "),
        ("from torch_xla.runtime import use_spmd", "torch_xla.runtime has no 'use_spmd'; it has device_type, "),
        ("import torch_neuronx.distributed", "torch_neuronx has no 'distributed'; it has BucketModelConfig, "),
    ],
)
def test_import_of_what_the_stand_in_lacks_is_an_error_that_lists_what_it_has(tmp_path, run_script, line, message):
    (tmp_path / "other.py").write_text(
        f"try:\n    {line}\nexcept ImportError:\n    print('guarded')\nimport sys; sys.stdout.flush()\n{line}\n"
    )

    result = run_script(script="other.py")

    assert (result.returncode, result.stdout) == (1, "guarded\n")
    assert (
        f"ModuleNotFoundError: {line.split()[1].partition('.')[0].replace('_', '-')} is not installed" in result.stderr
    )
    assert f"the stand-in for {message}" in result.stderr
    assert "only where torch-" in result.stderr


def test_library_that_looks_for_a_tpu_learns_that_there_is_none(tmp_path, run_script):
    (tmp_path / "other.py").write_text(
        "from torch_xla.experimental import tpu\ntry:\n    tpu.version()\nexcept OSError as error:\n    print(error)\n"
    )

    result = run_script(script="other.py")

    assert result.stdout == "there is no TPU: torch-xla is not installed\n", result.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", ["xla", "gloo"])
def test_script_of_one_rank_starts_torch_distributed_and_hears_of_variables_without_effect(
    tmp_path, run_script, monkeypatch, backend
):
    monkeypatch.setenv("XLA_USE_BF16", "1")
    (tmp_path / "other.py").write_text(
        "import os\nos.environ['XLA_DOWNCAST_BF16'] = '1'\n"
        f"import torch.distributed as dist\ndist.init_process_group({backend!r})\nprint(dist.get_world_size())\n"
    )

    result = run_script(script="other.py")

    assert own_lines(result) == ["1"], result.stderr
    for variable in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
        assert result.stderr.count(f"{variable}=1: no effect without torch-xla") == 1


def test_uninstall_restores_torch_and_removes_the_modules():
    code = """
import importlib.util
import torch, torch.distributed as dist
from nxd_neuronx.xla_stand_in import install, uninstall
before = torch.jit.load, dist.init_process_group
install()
import torch_xla.core.xla_model
assert torch.ones(1, device="xla").device == torch_xla.core.xla_model.xla_device()
uninstall()
assert (torch.jit.load, dist.init_process_group) == before
assert importlib.util.find_spec("torch_xla") is None
"""
    subprocess.run([sys.executable, "-c", code], check=True)
