"""The compilers by name: `export`, `inductor`, `neuronx`, `neuron` and `hlo`."""

from nxd_state import compile_backend, is_lazy_device

from nxd_trace.compilers.builtin import EXPORT, HLO, INDUCTOR, CompileJob, Compiler, Run, has_cpp_compiler
from nxd_trace.compilers.neuronx import NEURON, NEURONX

__all__ = ["CompileJob", "Compiler", "Run", "COMPILERS", "choose_compiler"]

COMPILERS = {compiler.name: compiler for compiler in (EXPORT, INDUCTOR, NEURONX, NEURON, HLO)}


def choose_compiler(name: str | None) -> Compiler:
    """Return the compiler of this name; by default "neuronx" on an XLA device, "neuron" on torch's native device,
    otherwise "inductor" if a C++ compiler is present, else "export".

    Raises:
        ValueError: there is no compiler of this name.
    """
    if name is None:
        name = NEURONX.name if is_lazy_device() else compile_backend()
        if name == INDUCTOR.name and not has_cpp_compiler():
            name = EXPORT.name
    if name not in COMPILERS:
        raise ValueError(f"unknown compiler={name!r}; use one of {', '.join(COMPILERS)}")
    return COMPILERS[name]
