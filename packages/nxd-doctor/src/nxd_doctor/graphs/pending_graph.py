"""Reads the graph that torch-xla has recorded in this process but not run yet: as text, as bytes, with its inputs.

All tensors of the process that are not computed yet are lowered as one module, as `step_boundary` would do.
"""

import gc
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nxd_state.device import get_device, is_lazy_device, torch_xla_module
from torch import Tensor

Aliases = tuple[Tensor, ...]  # the Python objects of one torch-xla tensor


@dataclass(frozen=True)
class PendingGraph:
    """The graph that the device's compiler would get.

    Attributes:
        text: the graph as HLO text.
        proto: the graph as a serialized `HloModuleProto`.
        inputs: the current values of the module's parameters, on the CPU, in order.
        outputs: for each of the module's results, the tensors of this process that it belongs to.
    """

    text: str
    proto: bytes
    inputs: list[Tensor]
    outputs: list[Aliases]


def pending_graph() -> PendingGraph | None:
    """Return the recorded graph; None if nothing is pending."""
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
    """Return this process's XLA tensors that are not computed yet, in the order of their creation.

    Tensors that only C++ holds are not found. That includes all tensors that autograd saves for the backward, unless
    saved-tensor hooks have turned them into Python objects.
    """
    found = [it for it in gc.get_objects() if issubclass(type(it), Tensor) and _is_on_xla(it)]
    # A gradient made by backward gets its Python object only when it is first read.
    found += [it.grad for it in found if it.is_leaf and it.grad is not None]
    # A tensor that was changed in place gets a new id when it is next inspected: here, in arbitrary order. But it keeps
    # the alias id of the original tensor.
    xla = _xla_core()
    by_id: dict[tuple[int, int], dict[int, Tensor]] = {}
    for it in found:
        by_id.setdefault((xla._xla_get_tensor_view_alias_id(it), xla._xla_get_tensor_id(it)), {})[id(it)] = it
    ordered = [tuple(by_id[key].values()) for key in sorted(by_id)]
    flags = _are_pending([aliases[0] for aliases in ordered])
    return [aliases for aliases, is_pending in zip(ordered, flags, strict=True) if is_pending]


@torch.no_grad()
def put_results(outputs: Sequence[Aliases], results: Sequence[Tensor]) -> None:
    """Give a graph's outputs values that were computed elsewhere; torch-xla then considers them computed.

    Each becomes a separate tensor: a view of another tensor that is kept across steps no longer follows that tensor.
    """
    xla, device = _xla_core(), str(get_device())
    # Not with `to`, which turns the scalars 0 and 1 into constants, which are pending again.
    computed = xla._xla_tensors_from_aten(list(results), [device] * len(results))
    for aliases, result in zip(outputs, computed, strict=True):
        for output in aliases:
            # Not torch-xla's own replacement: the storage under the tensor, and so later views, would stay uncomputed.
            output.data = result
    # The next graph's collectives and random numbers start new chains.
    xla._set_all_reduce_token(device, None)
    xla._xla_set_rng_seed(xla._xla_get_rng_seed(device), device)


def is_pending(tensor: Tensor) -> bool:
    """Whether an XLA tensor is not computed yet; a part of a computed one, in any shape or dtype, counts as such."""
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
        return is_lazy_device(tensor)
    except RuntimeError:  # the Python object outlives the tensor, in a reference cycle not collected yet
        return False


@torch.no_grad()
def _are_pending(tensors: list[Tensor]) -> list[bool]:
    flags: list[bool] = _xla_core()._check_tensor_need_materialization(tensors)
    return flags


def _xla_core() -> Any:
    return torch_xla_module()._XLAC
