"""The compilers by name: `export`, `inductor`, `neuronx` and `hlo`, one file each."""

from nxd_state import records_graphs

from nxd_trace.compilers.base import CompileJob, Compiler, Run
from nxd_trace.compilers.export import EXPORT
from nxd_trace.compilers.hlo import HLO
from nxd_trace.compilers.inductor import INDUCTOR, has_cpp_compiler
from nxd_trace.compilers.neuronx import NEURONX

__all__ = ["CompileJob", "Compiler", "Run", "COMPILERS", "choose_compiler"]

COMPILERS = {compiler.name: compiler for compiler in (EXPORT, INDUCTOR, NEURONX, HLO)}


def choose_compiler(name: str | None) -> Compiler:
    """The compiler of this name; without one "neuronx" on an XLA device, else "inductor" where a C++ compiler is
    present, else "export".

    Raises:
        ValueError: there is none of this name.
    """
    if name is None:
        name = "neuronx" if records_graphs() else "inductor" if has_cpp_compiler() else "export"
    if name not in COMPILERS:
        raise ValueError(f"compiler={name!r} is not known; use one of {', '.join(COMPILERS)}")
    return COMPILERS[name]
