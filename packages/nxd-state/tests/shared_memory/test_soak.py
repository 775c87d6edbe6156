"""A long run of random operations, each checked against what it must give.

    python packages/nxd-state/tests/shared_memory/test_soak.py --operations 1000000 --ranks 4

runs it for longer; on four ranks and two idle cores that takes some minutes.
"""

import argparse
import random
import time

import nxd_state
import pytest
import torch
import torch.distributed as dist
from nxd_state import Receive, Send
from nxd_testing import run_on_ranks

KINDS = ("all_reduce", "all_reduce_", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "messages")
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.int64, torch.float64)
SIZES = (1, 3, 16, 200, 5000, 5000, 300_000)  # elements of each rank's part
WEIGHTS = (30, 20, 20, 20, 8, 2, 0.2)
MOST_UNDER_WAY = 6


def soak(operations, seed):
    """Runs that many; returns how many were checked, and how long they took."""
    drawing = random.Random(seed)
    world_size = dist.get_world_size()
    nxd_state.initialize_model_parallel(2 if world_size % 2 == 0 else world_size)
    groups = [group for axis in ("tp", "dp") if (group := nxd_state.get_group(axis)).size > 1]
    groups.append(nxd_state.get_world_group())
    assert all(group.shared_memory is not None for group in groups)
    begun = time.monotonic()
    under_way = []
    for number in range(operations):
        group = drawing.choice(groups)
        kind, dtype = drawing.choice(KINDS), drawing.choice(DTYPES)
        numel = drawing.choices(SIZES, WEIGHTS)[0]
        is_async, most = drawing.random() < 0.3, drawing.randrange(MOST_UNDER_WAY)
        under_way.append(begin(kind, group, numel, dtype, number % 7, is_async))
        if drawing.random() < 0.3:
            drawing.shuffle(under_way)
        if random.random() < 0.001:  # each rank at its own times
            time.sleep(0.002)
        while len(under_way) > most:
            under_way.pop()()
    for finish in under_way:
        finish()
    nxd_state.barrier(groups[-1])
    return operations, time.monotonic() - begun


def begin(kind, group, numel, dtype, offset, is_async):
    """Start one; the function returned waits for it and checks it. Values are small whole numbers."""

    def full(value, parts=1):
        return torch.full((parts * numel,), value, dtype=dtype)

    size = group.size
    mine = group.rank + offset
    everyone = range(offset, offset + size)
    match kind:
        case "all_reduce" | "all_reduce_":
            found, expected = getattr(nxd_state, kind)(full(mine), group, async_op=is_async), full(sum(everyone))
        case "all_gather":
            found = nxd_state.all_gather(full(mine), group, async_op=is_async)
            expected = torch.cat([full(value) for value in everyone])
        case "reduce_scatter":
            found, expected = (
                nxd_state.reduce_scatter(full(mine, size), group, op="max", async_op=is_async),
                full(everyone[-1]),
            )
        case "all_to_all":
            found = nxd_state.all_to_all(full(mine, size), group, split_dim=0, concat_dim=0)
            expected = torch.cat([full(value) for value in everyone])
        case "broadcast":
            found, expected = nxd_state.broadcast(full(mine), group, source=size - 1), full(everyone[-1])
        case "barrier":
            found = expected = nxd_state.barrier(group)
        case "messages":
            following, before = (group.rank + 1) % size, (group.rank - 1) % size
            messages = [Send(full(mine), following), Receive(full(-1), before)]
            sent, found = nxd_state.batch_isend_irecv(messages, group)
            return lambda: check(found, full(before + offset), kind, sent)
    return lambda: check(found, expected, kind)


def check(found, expected, kind, sent=None):
    if sent is not None:
        sent.wait()
    result = found.wait() if isinstance(found, nxd_state.Pending) else found
    assert result is expected or torch.equal(result, expected), f"{kind}: {result} is not {expected}"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_many_random_operations_give_what_they_must(world_size):
    run_on_ranks(soak, world_size, 20_000, world_size, env={"NXD_SHM": "1"}, timeout=600)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    env = {"NXD_SHM": "1"}
    results = run_on_ranks(soak, options.ranks, options.operations, options.seed, env=env, timeout=24 * 3600)
    number, seconds = max(results)
    print(f"{number} operations on {options.ranks} ranks in {seconds:.0f} s")


if __name__ == "__main__":
    main()
