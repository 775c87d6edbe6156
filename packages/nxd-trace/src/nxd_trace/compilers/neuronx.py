"""Compilers for Neuron devices: "neuronx" for torch-xla's device, "neuron" for torch's native device.

"neuronx" calls `torch_neuronx.trace`, which runs neuronx-cc. "neuron" stores the graph as "export" does, and compiles
it with `torch.compile(backend="neuron", dynamic=False)` when it is loaded; torch-neuronx caches the result.
torch-neuronx comes from AWS's package index and is imported only here. Without its hardware, "neuronx" has been tested
against the documented signature, and "neuron" on the stand-in device of `nxd_testing`.
"""

import importlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from nxd_state import keep_compiled_code_private
from torch import Tensor, nn

from nxd_trace.compilers.builtin import EXPORT, CompileJob, Compiler, Run, constants_of

_FILE = "program.pt"
_DISTRIBUTIONS = ("torch-neuronx", "neuronx-cc")


class _Bound(nn.Module):
    """A recorded graph with its weights and states as parameters, for torch_neuronx.

    Returns the outputs, then the new states.
    """

    def __init__(self, job: CompileJob) -> None:
        super().__init__()
        exported = job.exported
        held = job.tensors[: job.num_weights + job.num_states]
        self._forward = exported.graph_module.forward
        self.held = nn.ParameterList([nn.Parameter(tensor.detach().clone(), requires_grad=False) for tensor in held])
        self._num_weights = job.num_weights
        self._constants = constants_of(exported)

    @property
    def states(self) -> list[nn.Parameter]:
        """The parameters that are state."""
        return list(self.held)[self._num_weights :]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        weights = list(self.held)[: self._num_weights]
        states = [state.clone() for state in self.states]  # the graph updates them in place; the alias stores them
        return (*self._forward(*self._constants, *weights, *states, *inputs), *states)


def trace_arguments(job: CompileJob) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of `torch_neuronx.trace` for this job."""
    bound = _Bound(job)
    num_outputs = len(job.exported.graph_signature.user_outputs)
    keywords = {
        "input_output_aliases": {state: num_outputs + index for index, state in enumerate(bound.states)},
        "compiler_workdir": str(job.workdir),
        "compiler_args": list(job.arguments),
        "inline_weights_to_neff": job.inline_weights,
    }
    return (bound, tuple(job.tensors[job.num_weights + job.num_states :])), keywords


def _torch_neuronx() -> Any:
    try:
        return importlib.import_module("torch_neuronx")
    except ImportError as error:
        raise RuntimeError(
            "compiler 'neuronx' needs torch-neuronx and neuronx-cc from AWS's package index (on PyPI these "
            "names are placeholders); install them, or use compiler='export'"
        ) from error


def _compile(job: CompileJob) -> None:
    arguments, keywords = trace_arguments(job)
    traced = _torch_neuronx().trace(*arguments, **keywords)
    torch.jit.save(traced, str(job.folder / _FILE))


def _load(folder: Path, device: torch.device) -> Run:
    _torch_neuronx()  # registers the classes of the saved program
    program = torch.jit.load(str(folder / _FILE))

    def run(tensors: list[Tensor]) -> Sequence[Tensor]:
        outputs = program(*tensors)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)

    return run


def _version() -> str:
    found = []
    for name in _DISTRIBUTIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def _compile_native(job: CompileJob) -> None:
    job.check_no_arguments("neuron", "; set NEURON_CC_FLAGS")
    EXPORT.compile(job)


def _load_native(folder: Path, device: torch.device) -> Run:
    keep_compiled_code_private()
    run: Run = torch.compile(EXPORT.load(folder, device), backend="neuron", dynamic=False)
    return run


NEURONX = Compiler(name="neuronx", version=_version, compile=_compile, load=_load, is_code=True, holds_tensors=True)
NEURON = Compiler(
    name="neuron",
    version=EXPORT.version,
    compile=_compile_native,
    load=_load_native,
    is_code=False,
    check=EXPORT.check,
)
