"""Optimizer states without a model that could name their parameters: kept as each rank gave them.

A `state_dict` knows parameters by numbers only, so it comes back at the degrees of its saving and no others. It
lies in the checkpoint as the bytes of a file of torch's, which the restricted unpickler reads.
"""

import io
from collections.abc import Mapping
from typing import Any

import torch
from nxd_ckpt import Checkpoint, CheckpointError
from nxd_ckpt.interop.safe_pickle import load_torch_stream
from nxd_state import active_group
from torch import Tensor

from nxd_trainer.api.rank_sync import is_first_replica
from nxd_trainer.api.stored_values import check_readable
from nxd_trainer.checkpoint import OPTIMIZER_DICT_PREFIX


def dict_state(state: Mapping[str, Any], *, zero1: bool) -> dict[str, Tensor]:
    """The one tensor, uint8 `[bytes]`, that this rank has to save; none where another replica saves the same.

    Args:
        state: an optimizer's `state_dict()`.
        zero1: each replica has a state of its own.

    Raises:
        ValueError: it holds what could only be read by running code.
    """
    if not zero1 and not is_first_replica():
        return {}
    stream = io.BytesIO()
    torch.save(state, stream)
    check_readable("the optimizer's state", stream.getvalue())
    return {_own_name(zero1=zero1): torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)}


def holds_dict_state(checkpoint: Checkpoint) -> bool:
    """Whether an optimizer's state was saved as ranks gave it."""
    return any(name.startswith(OPTIMIZER_DICT_PREFIX) for name in checkpoint.tensors)


def read_dict_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """What this rank, or the first replica of it, gave.

    Raises:
        CheckpointError: it was saved at other degrees, or is damaged.
    """
    for zero1 in (True, False):
        name = _own_name(zero1=zero1)
        if name in checkpoint.tensors:
            content = io.BytesIO(checkpoint.read(name).numpy().tobytes())
            state: dict[str, Any] = load_torch_stream(content, f"{name} of checkpoint {checkpoint.tag!r}")
            return state
    found = sorted(
        name.removeprefix(OPTIMIZER_DICT_PREFIX)
        for name in checkpoint.tensors
        if name.startswith(OPTIMIZER_DICT_PREFIX)
    )
    raise CheckpointError(
        f"checkpoint {checkpoint.tag!r} has the optimizer's state as a dict of {', '.join(found[-4:])}, and none of "
        "this rank; use the degrees of that run, or save the optimizer itself and the model, which load at any degrees"
    )


def _own_name(*, zero1: bool) -> str:
    """Says the degrees as well, as the same rank of another layout had other parameters."""
    axes = ("pp", "tp", "dp", "cp") if zero1 else ("pp", "tp")
    groups = [(axis, active_group(axis)) for axis in axes]
    return OPTIMIZER_DICT_PREFIX + "-".join(
        f"{axis}_rank_{group.rank:02d}_of_{group.size:02d}" for axis, group in groups
    )
