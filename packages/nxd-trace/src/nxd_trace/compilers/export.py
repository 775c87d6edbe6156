"""Compiler "export": a torch.export program, run operator by operator. Needs nothing but torch, and no time."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind

from nxd_trace.compilers.base import CompileJob, Compiler, Run

_FILE = "program.pt2"


def _compile(job: CompileJob) -> None:
    if job.arguments:
        raise ValueError(f"compiler_args={list(job.arguments)}: compiler 'export' takes none")
    example_inputs = job.exported.example_inputs
    job.exported.example_inputs = None  # they are the weights, which lie elsewhere
    try:
        torch.export.save(job.exported, job.folder / _FILE)
    finally:
        job.exported.example_inputs = example_inputs


def _load(folder: Path, device: torch.device) -> Run:
    exported = torch.export.load(folder / _FILE)
    constants = [
        exported.constants[str(spec.target)].to(device)
        for spec in exported.graph_signature.input_specs
        if spec.kind == InputKind.CONSTANT_TENSOR
    ]
    forward = exported.graph_module.forward  # the bare graph, without checks and nesting: constants come first

    def run(tensors: list[Tensor]) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = forward(*constants, *tensors)
        return outputs

    return run


EXPORT = Compiler(name="export", version=lambda: torch.__version__, compile=_compile, load=_load)
