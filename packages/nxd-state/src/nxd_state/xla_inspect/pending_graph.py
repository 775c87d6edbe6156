"""The graph that torch-xla has recorded in this process and not yet run: as text, as bytes, with what it reads.

All tensors of the process that are still to be computed are lowered as one module, as `step_boundary` would do it.
"""

import gc
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nxd_state.device import get_device


@dataclass(frozen=True)
class PendingGraph:
    """What the device's compiler would get.

    Attributes:
        text: HLO.
        proto: the same as a serialised `HloModuleProto`.
        inputs: what the module's parameters are now, on the CPU, in their order.
        outputs: the tensors of this process that the module's results belong to, in their order.
    """

    text: str
    proto: bytes
    inputs: list[Tensor]
    outputs: list[Tensor]


def pending_graph() -> PendingGraph | None:
    """The recorded graph; None where nothing is to be computed."""
    outputs = pending_tensors()
    if not outputs:
        return None
    xla = _xla_core()
    _, inputs = xla._get_tensors_xla_device_data_node(outputs)
    return PendingGraph(
        text=xla._get_xla_tensors_hlo(outputs),
        proto=xla._get_xla_tensors_hlo_proto(outputs),
        inputs=xla._xla_get_cpu_tensors(inputs),
        outputs=outputs,
    )


def pending_tensors() -> list[Tensor]:
    """This process's tensors on XLA that are not computed yet, in the order in which they were made."""
    found = [it for it in gc.get_objects() if issubclass(type(it), Tensor) and _is_on_xla(it)]
    # Python first learns of a gradient that backward has made when somebody asks for it.
    found += [it.grad for it in found if it.is_leaf and it.grad is not None]
    # A tensor that was changed in place has a new number, given when it is next looked at: here, in no certain order.
    # But it keeps that of the tensor it was made as.
    xla = _xla_core()
    by_id = {(xla._xla_get_tensor_view_alias_id(it), xla._xla_get_tensor_id(it)): it for it in found}
    ordered = [by_id[key] for key in sorted(by_id)]
    return [it for it, is_pending in zip(ordered, _are_pending(ordered), strict=True) if is_pending]


@torch.no_grad()
def put_results(outputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Make the outputs of a graph what was computed for them elsewhere; to torch-xla they are computed then.

    Each becomes a tensor of its own: a view of another one, kept from step to step, no longer follows that.
    """
    device = get_device()
    for output, result in zip(outputs, results, strict=True):
        # Not torch-xla's own replacement, which leaves the storage under the tensor, and so later views, uncomputed.
        output.data = result.to(device)
    # The next graph's collectives and random numbers begin chains of their own.
    xla = _xla_core()
    xla._set_all_reduce_token(str(device), None)
    xla._xla_set_rng_seed(xla._xla_get_rng_seed(str(device)), str(device))


def is_pending(tensor: Tensor) -> bool:
    """Whether a tensor on XLA is still to be computed; a part of a computed one, in any shape and dtype, is not."""
    operations = set(_OPERATION.findall(_xla_core()._get_xla_tensors_text([tensor])))
    return _are_pending([tensor])[0] and not operations <= _PARTS


_OPERATION = re.compile(r" (\w+::\w+)\(")
_PARTS = {
    "aten::permute",
    "aten::view",
    "prim::Constant",
    "xla::cast",
    "xla::device_data",
    "xla::generic_slice",
    "xla::select",
}


def _is_on_xla(tensor: Tensor) -> bool:
    try:
        return tensor.device.type == "xla"
    except RuntimeError:  # Python's object outlives the tensor, in a cycle that is still to be collected
        return False


@torch.no_grad()
def _are_pending(tensors: list[Tensor]) -> list[bool]:
    flags: list[bool] = _xla_core()._check_tensor_need_materialization(tensors)
    return flags


def _xla_core() -> Any:
    return importlib.import_module("torch_xla")._XLAC
