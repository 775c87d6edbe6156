"""All-gather: every rank posts its tensor, a slot's worth in each round, and copies those of the others."""

import torch
from torch import Tensor

from nxd_state.shared_memory import signature
from nxd_state.shared_memory.channel import Steps
from nxd_state.shared_memory.copying import copy_bytes, plain
from nxd_state.shared_memory.layout import SLOT_BYTES, piece_of
from nxd_state.shared_memory.rounds import Rounds

_SMALL_BYTES = 256 * 1024  # above, copying while others copy is worth more waits


def all_gather(rounds: Rounds, tensor: Tensor, dim: int) -> Steps:
    """Concatenate the ranks' tensors along `dim`."""
    if tensor.nbytes <= _SMALL_BYTES:
        return _in_one_round(rounds, tensor, dim)
    return _in_many_rounds(rounds, plain(tensor), dim)


def _in_one_round(rounds: Rounds, tensor: Tensor, dim: int) -> Steps:
    what = signature.encode("all_gather", tensor.numel(), tensor.dtype)
    this = rounds.reserve()
    views = rounds.views(this, tensor.dtype, tensor.shape)
    yield from rounds.free(this)
    views[rounds.rank].copy_(tensor)
    rounds.post(this, what)
    yield from rounds.all_posted(this, what)
    result = torch.cat(views, dim)
    rounds.take(this)
    return result


def _in_many_rounds(rounds: Rounds, tensor: Tensor, dim: int) -> Steps:
    """While the others' slots of one round are copied, the next one is posted already."""
    what = signature.encode("all_gather", tensor.numel(), tensor.dtype)
    size, source = tensor.nbytes, tensor.data_ptr()
    piece = piece_of(size, SLOT_BYTES)
    gathered = tensor.new_empty((rounds.size, *tensor.shape))
    target = gathered.data_ptr()
    number = -(-size // piece)
    first = rounds.reserve(number)
    for step in range(number + 1):
        if step < number:
            start = step * piece
            yield from rounds.free(first + step)
            copy_bytes(rounds.address(rounds.rank, first + step), source + start, min(piece, size - start))
            rounds.post(first + step, what)
        if step > 0:
            start, this = (step - 1) * piece, first + step - 1
            yield from rounds.all_posted(this, what)
            for peer in rounds.peers:
                copy_bytes(target + peer * size + start, rounds.address(peer, this), min(piece, size - start))
            rounds.take(this)
    copy_bytes(target + rounds.rank * size, source, size)
    return gathered.flatten(0, 1) if dim == 0 else torch.cat(gathered.unbind(0), dim)
