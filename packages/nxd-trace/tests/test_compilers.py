"""AOTInductor on real graphs, the call of torch_neuronx, and compilers that are not installed."""

import sys
from pathlib import Path
from types import SimpleNamespace

import nxd_trace
import pytest
import torch
import traced_models as models
from nxd_state import get_device
from nxd_testing import run_on_neuron
from nxd_testing.neuron_device import register_neuron_compiler
from nxd_trace.compilers import COMPILERS, CompileJob, choose_compiler
from nxd_trace.exporting import export_model, read_aliases

ROW, AT_ZERO = torch.arange(8, dtype=torch.float64).unsqueeze(0), torch.tensor([0])


@pytest.fixture
def job(tmp_path) -> CompileJob:
    """The job of compiling `Cache` on one rank: no weights, one state, two inputs."""
    model = models.Cache()
    exported = export_model(model, read_aliases(model, ["rows"]), "main", (ROW, AT_ZERO), {})
    return CompileJob(
        exported=exported.exported,
        tensors=exported.tensors,
        num_weights=0,
        num_states=1,
        folder=tmp_path,
        workdir=tmp_path / "work",
        arguments=("--model-type", "transformer"),
        inline_weights=False,
    )


@pytest.mark.slow
def test_aot_inductor_program_of_two_ranks_keeps_state_and_takes_new_weights(trace, tmp_path):
    weights, x = models.logical_weights(), torch.randn(3, models.IN, dtype=torch.float64)
    settings = {"compiler": "inductor", "tp_degree": 2, "cache_dir": tmp_path / "cache"}

    cache = trace(models.cache, (ROW, AT_ZERO), **settings)
    once, twice = cache(ROW, AT_ZERO), cache(ROW, AT_ZERO + 1)
    torch.testing.assert_close(twice, 2 * once)
    mlp = trace(models.mlp, x, weights=weights, inline_weights_to_neff=False, **settings)
    torch.testing.assert_close(mlp(x), models.plain_mlp(weights, x), rtol=1e-12, atol=1e-12)
    mlp.replace_weights(models.logical_weights(seed=1))
    nxd_trace.parallel_model_save(mlp, tmp_path / "model")

    with nxd_trace.parallel_model_load(tmp_path / "model") as loaded:
        torch.testing.assert_close(loaded(x), models.plain_mlp(models.logical_weights(seed=1), x))


@pytest.mark.parametrize("step", ["compile", "load"])
def test_inductor_uses_no_folder_that_others_can_write_to(job, monkeypatch, tmp_path, step):
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted").chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "planted"))
    monkeypatch.setattr("nxd_trace.compilers.builtin.has_cpp_compiler", lambda: True)
    steps = {
        "compile": lambda: COMPILERS["inductor"].compile(CompileJob(**{**vars(job), "arguments": ()})),
        "load": lambda: COMPILERS["inductor"].load(tmp_path, torch.device("cpu")),
    }

    with pytest.raises(PermissionError, match=r"TORCHINDUCTOR_CACHE_DIR: other users can write to .*planted"):
        steps[step]()


def test_neuronx_calls_torch_neuronx_trace_as_documented(job, monkeypatch):
    calls = []

    def trace(func, example_inputs, **keywords):
        calls.append((func, example_inputs, keywords))
        return torch.jit.trace(func, example_inputs, check_trace=False)

    monkeypatch.setitem(sys.modules, "torch_neuronx", SimpleNamespace(trace=trace))
    compiler = choose_compiler("neuronx")
    compiler.compile(job)
    program = compiler.load(job.folder, torch.device("cpu"))

    ((func, example_inputs, keywords),) = calls
    assert [tuple(tensor.shape) for tensor in example_inputs] == [(1, 8), (1,)]
    assert keywords == {
        "input_output_aliases": {func.states[0]: 1},
        "compiler_workdir": str(job.workdir),
        "compiler_args": ["--model-type", "transformer"],
        "inline_weights_to_neff": False,
    }
    total, new_state = program([ROW, AT_ZERO])
    torch.testing.assert_close(total, ROW[0] + 1)
    torch.testing.assert_close(new_state[0], ROW[0] + 1)


def run_compiled(folder: Path, tensors: list[torch.Tensor]) -> tuple[str, torch.Tensor]:
    """Return the compiler that a rank on the stand-in device chooses, and its outputs."""
    register_neuron_compiler()
    compiler = choose_compiler(None)
    program = compiler.load(folder, get_device())
    return compiler.name, program([tensor.to(get_device()) for tensor in tensors])[0]


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="the stand-in needs torch 2.13")
def test_neuron_program_is_compiled_where_it_is_loaded_and_gives_what_the_model_gives(tmp_path):
    model, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
    exported = export_model(model, [], "main", (x,), {})
    to_compile = CompileJob(exported.exported, exported.tensors, 2, 0, tmp_path, tmp_path / "work", (), False)

    choose_compiler("neuron").compile(to_compile)
    [(name, found)] = run_on_neuron(run_compiled, 1, tmp_path, list(exported.tensors))

    assert name == "neuron"
    torch.testing.assert_close(found, model(x).detach())


@pytest.mark.parametrize(
    ("name", "text"),
    [("neuronx", "needs torch-neuronx and neuronx-cc from AWS"), ("hlo", "needs torch-xla"), ("inductor", "neither g")],
)
def test_compiler_that_is_not_installed_is_named(job, monkeypatch, name, text):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "torch_neuronx", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(RuntimeError, match=text):
        COMPILERS[name].compile(CompileJob(**{**vars(job), "arguments": ()}))


@pytest.mark.parametrize("name", ["export", "neuron", "hlo"])
def test_compilers_without_arguments_refuse_them(job, name):
    with pytest.raises(ValueError, match=rf"compiler {name!r} takes no arguments"):
        COMPILERS[name].compile(job)


def test_argument_that_is_no_setting_of_inductor_is_named(job):
    with pytest.raises(ValueError, match="'--model-type' is not a setting of torch"):
        COMPILERS["inductor"].compile(job)


@pytest.mark.xla
def test_hlo_has_the_collectives_of_the_graph_and_does_not_run(trace, tmp_path, monkeypatch):
    pytest.importorskip("torch_xla")
    monkeypatch.setenv("NXD_DEVICE", "cpu")  # where the model is built; the graph is one for the device
    model = trace(models.cache, (ROW, AT_ZERO), compiler="hlo", tp_degree=2, cache_dir=tmp_path)

    (text,) = [path.read_text() for path in model.folder.rglob("*.hlo.txt")]
    assert "replica_groups={{0,1}}" in text
    with pytest.raises(ValueError, match="are for inspection and do not run"):
        model(ROW, AT_ZERO)
