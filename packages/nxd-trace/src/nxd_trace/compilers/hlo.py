"""Compiler "hlo": writes the graph as the XLA compiler would get it, for inspection. it is recorded by torch-xla.

Writes `program.hlo.txt` (HLO text), `program.hlo.pb` (the HLO module, which `neuronx-cc compile` takes) and
`program.stablehlo.mlir`. Weights, states and inputs are parameters of the module; its results are the outputs, and the
states after the call. Collectives appear with their replica groups.
"""

import os
from pathlib import Path

import torch
from nxd_state.device import has_torch_xla, torch_xla_module
from torch.export.graph_signature import InputKind
from torch.export.passes import move_to_device_pass

from nxd_trace.compilers.base import CompileJob, Compiler, Run

HLO_PROTO, _HLO_TEXT, _STABLEHLO = "program.hlo.pb", "program.hlo.txt", "program.stablehlo.mlir"


def _compile(job: CompileJob) -> None:
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


def _load(folder: Path, device: torch.device) -> Run:
    raise RuntimeError(f"programs of compiler 'hlo' do not run; read {folder / _HLO_TEXT}")


HLO = Compiler(name="hlo", version=lambda: torch.__version__, compile=_compile, load=_load, is_code=False, runs=False)
