"""The interface of compilers: turn a recorded graph into files, and files into a runnable program."""

import ast
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nxd_state import keep_compiled_code_private
from nxd_state.device import has_torch_xla, torch_xla_module
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.export.passes import move_to_device_pass

from nxd_trace.compilers.graph_file import VERSION, read_graph, write_graph

# Takes weights, states and inputs in one flat list, updates the states in place, and gives the outputs. A program that
# holds its weights and states takes the inputs only.
Run = Callable[[list[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class CompileJob:
    """One program to compile.

    Attributes:
        exported: the graph; its inputs are weights, states and inputs, one after the other, and it has no parameters.
        tensors: these inputs.
        num_weights: number of weights among them.
        num_states: number of states among them.
        folder: folder for the compiled program.
        workdir: folder for intermediate files.
        arguments: the user's compiler_args.
        inline_weights: the program may keep the weights inside.
    """

    exported: ExportedProgram
    tensors: Sequence[Tensor]
    num_weights: int
    num_states: int
    folder: Path
    workdir: Path
    arguments: tuple[str, ...]
    inline_weights: bool


@dataclass(frozen=True)
class Compiler:
    """One way to compile and run programs.

    Attributes:
        name: name that selects it.
        version: version of the compiler, for the cache key.
        compile: writes files into `job.folder`.
        load: makes them run on a device.
        is_code: to load a program is to run what its files say, so they must come from someone trusted.
        check: raises ValueError if a folder does not hold a program that takes this many tensors; None where only
            `load` could tell.
        holds_tensors: a program holds a rank's weights and states, so ranks share none, and weights cannot be replaced.
        runs: whether `load` gives something that runs; otherwise the files are for inspection.
    """

    name: str
    version: Callable[[], str]
    compile: Callable[[CompileJob], None]
    load: Callable[[Path, torch.device], Run]
    is_code: bool
    check: Callable[[Path, int], None] | None = None
    holds_tensors: bool = False
    runs: bool = True


def _compile_export(job: CompileJob) -> None:
    if job.arguments:
        raise ValueError(f"compiler_args={list(job.arguments)}: compiler 'export' takes none")
    write_graph(job.exported, job.folder)


def _load_export(folder: Path, device: torch.device) -> Run:
    held, graph = read_graph(folder)
    constants = [constant.to(device) for constant in held]
    forward = graph.forward  # the bare graph, without checks and nesting: constants come first

    def run(tensors: list[Tensor]) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = forward(*constants, *tensors)
        return outputs

    return run


def _check_export(folder: Path, num_inputs: int) -> None:
    constants, graph = read_graph(folder)
    taken = len(graph.graph.find_nodes(op="placeholder"))
    if taken != len(constants) + num_inputs:
        raise ValueError(f"the graph takes {taken} tensors; expected {len(constants)} constants and {num_inputs} more")


def _export_version() -> str:
    return f"{torch.__version__}, graph file {VERSION}"


EXPORT = Compiler(
    name="export",
    version=_export_version,
    compile=_compile_export,
    load=_load_export,
    is_code=False,
    check=_check_export,
)


_INDUCTOR_FILE = "program.pt2"


def has_cpp_compiler() -> bool:
    """Whether the C++ compiler that AOTInductor would call is installed."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None or shutil.which("clang++") is not None


def _compile_inductor(job: CompileJob) -> None:
    if not has_cpp_compiler():
        raise RuntimeError(
            "compiler 'inductor' needs a C++ compiler, and neither g++ nor clang++ is on the PATH; install one, or use "
            "compiler='export'"
        )
    keep_compiled_code_private()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`isinstance\\(treespec", FutureWarning)  # torch 2.13's, of its own code
        torch._inductor.aoti_compile_and_package(
            job.exported,
            package_path=str(job.folder / _INDUCTOR_FILE),
            inductor_configs=_inductor_settings(job.arguments),
        )


def _load_inductor(folder: Path, device: torch.device) -> Run:
    keep_compiled_code_private()
    index = -1 if device.index is None else device.index
    package = torch._inductor.aoti_load_package(str(folder / _INDUCTOR_FILE), device_index=index)
    run: Run = package.loader.run  # the bare program, without nesting
    return run


def _inductor_settings(arguments: tuple[str, ...]) -> dict[str, Any]:
    settings = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        try:
            settings[name.lstrip("-")] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            if not equals or not value:
                raise ValueError(
                    f"compiler_args={list(arguments)}: {argument!r} is not a setting of torch._inductor.config; write "
                    'them as "name=value", such as "max_autotune=True"'
                ) from None
            settings[name.lstrip("-")] = value
    return settings


def _inductor_version() -> str:
    """The code uses the instructions of the processor it was generated on."""
    return f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"


INDUCTOR = Compiler(
    name="inductor", version=_inductor_version, compile=_compile_inductor, load=_load_inductor, is_code=True
)


HLO_PROTO, _HLO_TEXT, _STABLEHLO = "program.hlo.pb", "program.hlo.txt", "program.stablehlo.mlir"


def _compile_hlo(job: CompileJob) -> None:
    if job.arguments:
        raise ValueError(f"compiler_args={list(job.arguments)}: compiler 'hlo' takes none")
    if not has_torch_xla():
        raise RuntimeError("compiler 'hlo' needs torch-xla: install torch_xla of the same version as torch")
    os.environ.setdefault("PJRT_DEVICE", "CPU")  # recording needs a client, and nothing is run on it
    torch_xla = torch_xla_module()
    device = torch_xla.device()
    exported = move_to_device_pass(job.exported, str(device))
    constants = [
        exported.constants[str(spec.target)].to(device)
        for spec in exported.graph_signature.input_specs
        if spec.kind == InputKind.CONSTANT_TENSOR
    ]
    tensors = [tensor.to(device) for tensor in job.tensors]
    states = tensors[job.num_weights : job.num_weights + job.num_states]
    with torch.no_grad():
        results = [*exported.graph_module.forward(*constants, *tensors), *states]
    (job.folder / _HLO_TEXT).write_text(torch_xla._XLAC._get_xla_tensors_hlo(results), encoding="utf-8")
    (job.folder / HLO_PROTO).write_bytes(torch_xla._XLAC._get_xla_tensors_hlo_proto(results))
    (job.folder / _STABLEHLO).write_text(torch_xla_module("core.xla_model").get_stablehlo(results), encoding="utf-8")


def _load_hlo(folder: Path, device: torch.device) -> Run:
    raise RuntimeError(f"programs of compiler 'hlo' do not run; read {folder / _HLO_TEXT}")


HLO = Compiler(
    name="hlo", version=lambda: torch.__version__, compile=_compile_hlo, load=_load_hlo, is_code=False, runs=False
)
