"""Compiler "export": a torch.export program, run operator by operator. Needs nothing but torch, and no time."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nxd_trace.compilers.base import CompileJob, Compiler, Run
from nxd_trace.compilers.graph_file import VERSION, read_graph, write_graph


def _compile(job: CompileJob) -> None:
    if job.arguments:
        raise ValueError(f"compiler_args={list(job.arguments)}: compiler 'export' takes none")
    write_graph(job.exported, job.folder)


def _load(folder: Path, device: torch.device) -> Run:
    held, graph = read_graph(folder)
    constants = [constant.to(device) for constant in held]
    forward = graph.forward  # the bare graph, without checks and nesting: constants come first

    def run(tensors: list[Tensor]) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = forward(*constants, *tensors)
        return outputs

    return run


def _check(folder: Path, num_inputs: int) -> None:
    constants, graph = read_graph(folder)
    taken = len(graph.graph.find_nodes(op="placeholder"))
    if taken != len(constants) + num_inputs:
        raise ValueError(f"the graph takes {taken} tensors; expected {len(constants)} constants and {num_inputs} more")


def _version() -> str:
    return f"{torch.__version__}, graph file {VERSION}"


EXPORT = Compiler(name="export", version=_version, compile=_compile, load=_load, is_code=False, check=_check)
