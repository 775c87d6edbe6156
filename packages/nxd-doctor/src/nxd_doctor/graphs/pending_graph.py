"""The graph that torch-xla has recorded in this process and not yet run: as text, as bytes, with its inputs.

All tensors of the process that are still to be computed are lowered as one module, as `step_boundary` would do it.
"""

import gc
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nxd_state.device import get_device, records_graphs, torch_xla_module
from torch import Tensor

Aliases = tuple[Tensor, ...]  # Python's several objects of what is one tensor to torch-xla


@dataclass(frozen=True)
class PendingGraph:
    """The graph that the device's compiler would get.

    Attributes:
        text: HLO.
        proto: the same as a serialised `HloModuleProto`.
        inputs: what the module's parameters are now, on the CPU, in their order.
        outputs: for each of the module's results, the tensors of this process that it belongs to.
    """

    text: str
    proto: bytes
    inputs: list[Tensor]
    outputs: list[Aliases]


def pending_graph() -> PendingGraph | None:
    """The recorded graph; None where nothing is to be computed."""
    outputs = pending_tensors()
    if not outputs:
        return None
    xla, firsts = _xla_core(), [aliases[0] for aliases in outputs]
    _, inputs = xla._get_tensors_xla_device_data_node(firsts)
    return PendingGraph(
        text=xla._get_xla_tensors_hlo(firsts),
        proto=xla._get_xla_tensors_hlo_proto(firsts),
        inputs=xla._xla_get_cpu_tensors(inputs) if inputs else [],
        outputs=outputs,
    )


def pending_tensors() -> list[Aliases]:
    """This process's tensors on XLA that are not computed yet, in the order in which they were made.

    Those that only C++ holds are not found; of what autograd saves for the backward these are all, unless hooks for
    saved tensors have made them Python's.
    """
    found = [it for it in gc.get_objects() if issubclass(type(it), Tensor) and _is_on_xla(it)]
    # A gradient made by backward gets its Python object only when it is first read.
    found += [it.grad for it in found if it.is_leaf and it.grad is not None]
    # A tensor that was changed in place has a new number, given when it is next looked at: here, in no certain order.
    # But it keeps that of the tensor it was made as.
    xla = _xla_core()
    by_id: dict[tuple[int, int], dict[int, Tensor]] = {}
    for it in found:
        by_id.setdefault((xla._xla_get_tensor_view_alias_id(it), xla._xla_get_tensor_id(it)), {})[id(it)] = it
    ordered = [tuple(by_id[key].values()) for key in sorted(by_id)]
    flags = _are_pending([aliases[0] for aliases in ordered])
    return [aliases for aliases, is_pending in zip(ordered, flags, strict=True) if is_pending]


@torch.no_grad()
def put_results(outputs: Sequence[Aliases], results: Sequence[Tensor]) -> None:
    """Make the outputs of a graph what was computed for them elsewhere; to torch-xla they are computed then.

    Each becomes a tensor of its own: a view of another one, kept from step to step, no longer follows that.
    """
    xla, device = _xla_core(), str(get_device())
    # Not by `to`, which makes constants of the scalars 0 and 1, pending again.
    computed = xla._xla_tensors_from_aten(list(results), [device] * len(results))
    for aliases, result in zip(outputs, computed, strict=True):
        for output in aliases:
            # Not torch-xla's own replacement: the storage under the tensor, and so later views, would stay uncomputed.
            output.data = result
    # The next graph's collectives and random numbers begin chains of their own.
    xla._set_all_reduce_token(device, None)
    xla._xla_set_rng_seed(xla._xla_get_rng_seed(device), device)


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
        return records_graphs(tensor)
    except RuntimeError:  # Python's object outlives the tensor, in a cycle that is still to be collected
        return False


@torch.no_grad()
def _are_pending(tensors: list[Tensor]) -> list[bool]:
    flags: list[bool] = _xla_core()._check_tensor_need_materialization(tensors)
    return flags


def _xla_core() -> Any:
    return torch_xla_module()._XLAC
