"""Adding the ranks' parts: always in the order of the ranks, so that every rank and every run gets the same bits."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nxd_state.shared_memory.dispatch_modes import OutsideOfModes

_HALF = (torch.float16, torch.bfloat16)
_TWO: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


REDUCTIONS = tuple(_TWO)


@functools.cache
def check_reducible(dtype: torch.dtype, op: str) -> None:
    """Raises what torch raises for a dtype that it cannot add or compare, before anything is sent."""
    with torch.inference_mode(False), OutsideOfModes():
        one = torch.ones(1, device="cpu").to(dtype)
        combine([one, one, one], op)


def combine(parts: Sequence[Tensor], op: str, out: Tensor | None = None) -> Tensor:
    """The parts (at least two, of one shape and dtype) combined: a new tensor, or `out`, which is none of them.

    Half precision is added in float32 and rounded once.
    """
    two = _TWO[op]
    if parts[0].dtype in _HALF and (op == "avg" or (op == "sum" and len(parts) > 2)):
        wide = combine([parts[0].float(), *parts[1:]], op)
        return wide.to(parts[0].dtype) if out is None else out.copy_(wide)
    total = two(parts[0], parts[1]) if out is None else two(parts[0], parts[1], out=out)
    for part in parts[2:]:
        two(total, part, out=total)
    return total.div_(len(parts)) if op == "avg" else total
