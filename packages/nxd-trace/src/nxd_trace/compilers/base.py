"""The interface of compilers: turn a recorded graph into files, and files into a runnable program."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

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
