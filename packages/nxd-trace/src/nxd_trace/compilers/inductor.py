"""Compiler "inductor": AOTInductor, which fuses operators into C++ or GPU kernels ahead of time.

`compiler_args` are settings of `torch._inductor.config` as "name=value", such as "max_autotune=True".
"""

import ast
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from nxd_state import keep_compiled_code_private

from nxd_trace.compilers.base import CompileJob, Compiler, Run

_FILE = "program.pt2"


def has_cpp_compiler() -> bool:
    """Whether the C++ compiler that AOTInductor would call is installed."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None or shutil.which("clang++") is not None


def _compile(job: CompileJob) -> None:
    if not has_cpp_compiler():
        raise RuntimeError(
            "compiler 'inductor' needs a C++ compiler, and neither g++ nor clang++ is on the PATH; install one, or use "
            "compiler='export'"
        )
    keep_compiled_code_private()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`isinstance\\(treespec", FutureWarning)  # torch 2.13's, of its own code
        torch._inductor.aoti_compile_and_package(
            job.exported, package_path=str(job.folder / _FILE), inductor_configs=_settings(job.arguments)
        )


def _load(folder: Path, device: torch.device) -> Run:
    keep_compiled_code_private()
    index = -1 if device.index is None else device.index
    package = torch._inductor.aoti_load_package(str(folder / _FILE), device_index=index)
    run: Run = package.loader.run  # the bare program, without nesting
    return run


def _settings(arguments: tuple[str, ...]) -> dict[str, Any]:
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


def _version() -> str:
    """The code uses the instructions of the processor it was generated on."""
    return f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"


INDUCTOR = Compiler(name="inductor", version=_version, compile=_compile, load=_load, is_code=True)
