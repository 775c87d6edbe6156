"""Random sequences of collectives and messages give through shared memory what they give over gloo.

What is summed are small whole numbers, so that the order of summation, in which the two differ, changes nothing.
"""

import random

import nxd_state
import pytest
import torch
import torch.distributed as dist
from nxd_state import Receive, Send
from nxd_testing import run_on_ranks

SHARED = {"NXD_SHM": "1"}
REDUCED = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]
MOVED = [*REDUCED, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn]
OPERATIONS = [
    "all_reduce",
    "all_reduce_",
    "all_gather",
    "all_gather_",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "messages",
]
LARGEST = 3 * 2**17  # elements: several rounds and chunks


class Draw:
    """One random operation, the same on all ranks."""

    def __init__(self, random, size):
        self.operation = random.choice(OPERATIONS)
        self.op = random.choice(["sum", "max", "min"])
        reduces = "reduce" in self.operation
        self.dtype = random.choice(REDUCED if reduces else MOVED)
        if reduces and self.dtype.is_floating_point and random.random() < 0.2:
            self.op = "avg"
        numel = random.choice([0, 1, random.randrange(1, 40), random.randrange(40, 9000), random.randrange(LARGEST)])
        if random.random() < 0.3:
            numel = min(numel, 2000)
        columns = random.choice([1, 3, 4])
        self.shape = (size * -(-numel // (size * columns * size)), size * columns)
        self.is_transposed = random.random() < 0.3
        self.is_async = random.random() < 0.4
        self.dims = random.randrange(2), random.randrange(2)
        self.source = random.randrange(size)
        self.axis = random.choice(["tp", "dp", "world"])
        self.seed = random.randrange(2**30)

    def tensor(self, rank):
        generator = torch.Generator().manual_seed(self.seed + rank)
        tensor = torch.randint(0, 5, self.shape, generator=generator).to(self.dtype)
        return tensor.t() if self.is_transposed else tensor


def begin(draw, tensor, group):
    """Start the operation; the function returned gives its results."""
    match draw.operation:
        case "all_reduce" | "all_reduce_":
            call = getattr(nxd_state, draw.operation)
            arguments = {"op": draw.op}
        case "all_gather":
            call, arguments = nxd_state.all_gather, {"dim": draw.dims[0]}
        case "all_gather_":
            call, arguments, tensor = nxd_state.all_gather_, {}, tensor.contiguous()
        case "reduce_scatter":
            call, arguments = nxd_state.reduce_scatter, {"dim": draw.dims[0], "op": draw.op}
        case "all_to_all":
            result = nxd_state.all_to_all(tensor, group, split_dim=draw.dims[0], concat_dim=draw.dims[1])
            return lambda: [result]
        case "broadcast":
            result = nxd_state.broadcast(tensor, group, source=draw.source % group.size)
            return lambda: [result]
        case "messages":
            return begin_messages(tensor, group)
    if draw.is_async:
        pending = call(tensor, group, **arguments, async_op=True)
        return lambda: [pending.wait()]
    result = call(tensor, group, **arguments)
    return lambda: [result]


def begin_messages(tensor, group):
    """To all the others, twice, and from them."""
    others = [index for index in range(group.size) if index != group.rank]
    buffers = [torch.empty(tensor.shape, dtype=tensor.dtype) for _ in range(2) for _ in others]
    sends = [Send(tensor, index) for _ in range(2) for index in others]
    receives = [Receive(buffer, index) for buffer, index in zip(buffers, 2 * others, strict=True)]
    pending = nxd_state.batch_isend_irecv([*sends, *receives], group)
    return lambda: [message.wait() for message in pending][len(sends) :]


def same_bytes(one, other):
    one, other = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)


def over_gloo(group):
    """The same group without its memory."""
    return nxd_state.Group(group.axis, group.ranks, group.rank, group.replica_groups, group.process_group, group.name)


def compare(seed, number):
    """Runs random operations, several of them at a time, both ways; returns how many went through shared memory."""
    drawing = random.Random(seed)
    world_size = dist.get_world_size()
    nxd_state.initialize_model_parallel(drawing.choice([d for d in range(1, world_size + 1) if world_size % d == 0]))
    groups = {"tp": nxd_state.get_group("tp"), "dp": nxd_state.get_group("dp"), "world": nxd_state.get_world_group()}
    under_way = []
    shared = 0
    for _ in range(number):
        draw = Draw(drawing, world_size)
        group = groups[draw.axis]
        shared += group.shared_memory is not None
        tensor = draw.tensor(dist.get_rank())
        expected = begin(draw, tensor.clone(), over_gloo(group))()
        under_way.append((draw, expected, begin(draw, tensor, group)))
        if drawing.random() < 0.5:
            drawing.shuffle(under_way)
        while len(under_way) > drawing.randrange(6):
            check(*under_way.pop())
    while under_way:
        check(*under_way.pop())
    return shared


def check(draw, expected, finish):
    for one, other in zip(finish(), expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), vars(draw)
        assert same_bytes(one, other), vars(draw)


@pytest.mark.sample(3)
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_random_operations_give_what_they_give_over_gloo(world_size):
    number = 60 if world_size < 8 else 25

    def job():
        return compare(17 + world_size, number)

    for shared in run_on_ranks(job, world_size, env=SHARED):
        assert shared > number // 2
