"""The interface of compilers, and those that need no device: "export", "inductor" and "hlo"."""

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

# Takes weights, states and inputs in one flat list, updates the states in place, and returns the outputs. A program
# that holds its weights and states takes only the inputs.
Run = Callable[[list[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class CompileJob:
    """One program to compile.

    Attributes:
        exported: the graph, without parameters; its inputs are weights, states and inputs, in this order.
        tensors: example inputs of the graph.
        num_weights: number of weights among them.
        num_states: number of states among them.
        folder: folder for the compiled program.
        workdir: folder for intermediate files.
        arguments: the user's `compiler_args`.
        inline_weights: whether the program may contain the weights.
    """

    exported: ExportedProgram
    tensors: Sequence[Tensor]
    num_weights: int
    num_states: int
    folder: Path
    workdir: Path
    arguments: tuple[str, ...]
    inline_weights: bool

    def check_no_arguments(self, compiler: str, instead: str = "") -> None:
        """Raise ValueError if the user passed `compiler_args` to a compiler that takes none."""
        if self.arguments:
            raise ValueError(f"compiler_args={list(self.arguments)}: compiler {compiler!r} takes no arguments{instead}")


def constants_of(exported: ExportedProgram) -> list[Tensor]:
    """Return a graph's constants, which its forward takes before all other inputs."""
    specs = exported.graph_signature.input_specs
    return [exported.constants[str(spec.target)] for spec in specs if spec.kind == InputKind.CONSTANT_TENSOR]


@dataclass(frozen=True)
class Compiler:
    """One way to compile and run programs.

    Attributes:
        name: name that selects the compiler.
        version: function that returns its version, for the cache key.
        compile: function that writes a program into `job.folder`.
        load: function that loads a program from its folder, for a device.
        is_code: whether loading a program runs code from its files, so that they must come from a trusted source.
        check: function that raises ValueError if a folder does not hold a program with this number of inputs; None if
            only `load` can tell.
        holds_tensors: whether a program holds a rank's weights and states; then ranks share no programs, and weights
            cannot be replaced.
        runs: whether programs run; otherwise the files are for inspection.
    """

    name: str
    version: Callable[[], str]
    compile: Callable[[CompileJob], None]
    load: Callable[[Path, torch.device], Run]
    is_code: bool
    check: Callable[[Path, int], None] | None = None
    holds_tensors: bool = False
    runs: bool = True


# "export": a torch.export program, run operator by operator.


def _compile_export(job: CompileJob) -> None:
    job.check_no_arguments("export")
    write_graph(job.exported, job.folder)


def _load_export(folder: Path, device: torch.device) -> Run:
    stored, graph = read_graph(folder)
    constants = [constant.to(device) for constant in stored]
    forward = graph.forward  # the graph alone, without checks and nesting

    def run(tensors: list[Tensor]) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = forward(*constants, *tensors)
        return outputs

    return run


def _check_export(folder: Path, num_inputs: int) -> None:
    constants, graph = read_graph(folder)
    taken = len(graph.graph.find_nodes(op="placeholder"))
    if taken != len(constants) + num_inputs:
        raise ValueError(f"the graph takes {taken} tensors; expected {len(constants)} constants and {num_inputs} more")


EXPORT = Compiler(
    name="export",
    version=lambda: f"{torch.__version__}, graph file {VERSION}",
    compile=_compile_export,
    load=_load_export,
    is_code=False,
    check=_check_export,
)


# "inductor": AOTInductor, which fuses operators into C++ or GPU kernels ahead of time. `compiler_args` are settings of
# `torch._inductor.config` as "name=value", such as "max_autotune=True".

_INDUCTOR_FILE = "program.pt2"


def has_cpp_compiler() -> bool:
    """Whether the C++ compiler that AOTInductor calls is installed."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None or shutil.which("clang++") is not None


def _compile_inductor(job: CompileJob) -> None:
    if not has_cpp_compiler():
        raise RuntimeError(
            "compiler 'inductor' needs a C++ compiler, and neither g++ nor clang++ is on the PATH; install one, or use "
            "compiler='export'"
        )
    keep_compiled_code_private()
    settings = _inductor_settings(job.arguments)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`isinstance\\(treespec", FutureWarning)  # of torch 2.13's own code
        torch._inductor.aoti_compile_and_package(
            job.exported, package_path=str(job.folder / _INDUCTOR_FILE), inductor_configs=settings
        )


def _load_inductor(folder: Path, device: torch.device) -> Run:
    keep_compiled_code_private()
    index = -1 if device.index is None else device.index
    package = torch._inductor.aoti_load_package(str(folder / _INDUCTOR_FILE), device_index=index)
    run: Run = package.loader.run  # the program alone, without nesting
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


INDUCTOR = Compiler(
    name="inductor",
    # The code uses the instructions of the processor that it was generated on.
    version=lambda: f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}",
    compile=_compile_inductor,
    load=_load_inductor,
    is_code=True,
)


# "hlo": the graph as the XLA compiler gets it, recorded by torch-xla, for inspection. Weights, states and inputs are
# parameters of the module; its results are the outputs and the new states. Collectives have their replica groups.

HLO_PROTO, _HLO_TEXT, _STABLEHLO = "program.hlo.pb", "program.hlo.txt", "program.stablehlo.mlir"


def _compile_hlo(job: CompileJob) -> None:
    job.check_no_arguments("hlo")
    if not has_torch_xla():
        raise RuntimeError("compiler 'hlo' needs torch-xla: install torch_xla of the same version as torch")
    os.environ.setdefault("PJRT_DEVICE", "CPU")  # recording needs a client, but runs nothing
    torch_xla = torch_xla_module()
    device = torch_xla.device()
    exported = move_to_device_pass(job.exported, str(device))
    constants = [constant.to(device) for constant in constants_of(exported)]
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
