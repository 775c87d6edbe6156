"""All-to-all: every rank posts a part for each other one, and concatenates those for itself."""

import torch
from torch import Tensor

from nxd_state.shared_memory import signature
from nxd_state.shared_memory.channel import Steps
from nxd_state.shared_memory.copying import copy_bytes, plain
from nxd_state.shared_memory.exchange import exchange, is_small, split
from nxd_state.shared_memory.rounds import Rounds


def all_to_all(rounds: Rounds, tensor: Tensor, split_dim: int, concat_dim: int) -> Steps:
    """Cut `tensor` along `split_dim`, concatenate what comes along `concat_dim`."""
    parts = split(tensor, rounds.size, split_dim)
    what = signature.encode("all_to_all", tensor.numel(), tensor.dtype)
    if is_small(tensor):
        return _in_one_round(rounds, parts, concat_dim, what)
    return _in_many_rounds(rounds, plain(parts), concat_dim, what)


def _in_one_round(rounds: Rounds, parts: Tensor, concat_dim: int, what: int) -> Steps:
    this = rounds.reserve()
    views = rounds.views(this, parts.dtype, parts.shape)
    mine = rounds.parts(this, parts.dtype, parts.shape)
    yield from rounds.free(this)
    views[rounds.rank].copy_(parts)
    rounds.post(this, what)
    yield from rounds.all_posted(this, what)
    result = torch.cat(mine, concat_dim)
    rounds.take(this)
    return result


def _in_many_rounds(rounds: Rounds, parts: Tensor, concat_dim: int, what: int) -> Steps:
    received = torch.empty_like(parts)
    target, part_size = received.data_ptr(), parts.nbytes // rounds.size
    received[rounds.rank] = parts[rounds.rank]
    offset = rounds.rank * rounds.part_bytes()

    def take(this: int, start: int, size: int) -> None:
        for peer in rounds.peers:
            copy_bytes(target + peer * part_size + start, rounds.address(peer, this) + offset, size)

    yield from exchange(rounds, parts, what, take, received)
    return received.flatten(0, 1) if concat_dim == 0 else torch.cat(received.unbind(0), concat_dim)
