"""Any layout loads at any other, bit by bit: random tensors, cuts, copies and memory, on ranks that are threads."""

import random
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nxd_ckpt import Shard, ShardedTensor, checksums, load, plan, save, tensor_bytes
from nxd_ckpt.boxes import Box, boxes_of_range
from nxd_ckpt.tensor_bytes import CODE_OF_DTYPE
from nxd_ckpt.testing import run_on_threads


def cut_at_random(rng, box, pieces):
    """Cuts a box into about this many boxes."""
    boxes = [box]
    while len(boxes) < pieces:
        piece = boxes.pop(rng.randrange(len(boxes)))
        dims = [dim for dim, size in enumerate(piece.shape) if size > 1]
        if not dims:
            return [*boxes, piece]
        dim = rng.choice(dims)
        at = rng.randrange(1, piece.shape[dim])
        for start, size in ((0, at), (at, piece.shape[dim] - at)):
            offsets = [*piece.offsets[:dim], piece.offsets[dim] + start, *piece.offsets[dim + 1 :]]
            boxes.append(Box(tuple(offsets), (*piece.shape[:dim], size, *piece.shape[dim + 1 :])))
    return boxes


def memory_at_random(rng, shape, dtype):
    """A zeroed tensor of this shape with contiguous, padded or reversed-dims memory."""
    kind = rng.choice(["contiguous", "padded", "reversed"])
    if kind == "padded":
        return zeros([size + 2 for size in shape], dtype)[tuple(slice(1, 1 + size) for size in shape)]
    if kind == "reversed":
        return zeros(shape[::-1], dtype).permute(tuple(reversed(range(len(shape)))))
    return zeros(shape, dtype)


def zeros(shape, dtype):
    """Also of types that torch fills with nothing."""
    return torch.zeros([*shape, dtype.itemsize], dtype=torch.uint8).view(dtype).squeeze(-1)


def some_boxes(rng, shape, world_size):
    """Boxes anywhere, some of them on several ranks."""
    held = [[] for _ in range(world_size)]
    for box in cut_at_random(rng, Box.whole(shape), rng.randint(1, 2 * world_size)):
        for rank in rng.sample(range(world_size), rng.randint(1, world_size)):
            held[rank].append(box)
    return held


def rows(rng, shape, world_size):
    """Dim 0 in equal shares, the last ones smaller or empty, as a padded tensor is cut."""
    if not shape:
        return replicated(rng, shape, world_size)
    share = -(-shape[0] // world_size)
    bounds = [(min(rank * share, shape[0]), min((rank + 1) * share, shape[0])) for rank in range(world_size)]
    return [[Box((low,) + (0,) * (len(shape) - 1), (high - low, *shape[1:]))] for low, high in bounds]


def flat_shares(rng, shape, world_size):
    """The flattened tensor in unequal shares, as ZeRO cuts it."""
    num_elements = Box.whole(shape).num_elements
    cuts = sorted(rng.randint(0, num_elements) for _ in range(world_size - 1))
    return [list(boxes_of_range(shape, low, high)) for low, high in zip([0, *cuts], [*cuts, num_elements], strict=True)]


def every_other_row(rng, shape, world_size):
    """Row i is on rank i % world_size."""
    if not shape:
        return replicated(rng, shape, world_size)
    whole = Box.whole(shape)
    return [
        [Box((row, *whole.offsets[1:]), (1, *shape[1:])) for row in range(rank, shape[0], world_size)]
        for rank in range(world_size)
    ]


def replicated(rng, shape, world_size):
    return [[Box.whole(shape)]] * world_size


LAYOUTS = [some_boxes, rows, flat_shares, every_other_row, replicated]


def layout_at_random(rng, layout, shape, dtype, world_size):
    """One ShardedTensor per rank, in zeroed memory."""
    return [
        ShardedTensor(shape, [Shard(memory_at_random(rng, box.shape, dtype), box.offsets) for box in boxes], dtype)
        for boxes in layout(rng, shape, world_size)
    ]


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """So that small tensors have many blocks, parts and splits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "BLOCK_BYTES", 16)
        patch.setattr(plan, "BLOCK_BYTES", 64)
        patch.setattr(tensor_bytes, "PART_BYTES", 24)
        patch.setattr(tensor_bytes, "SCRATCH_BYTES", 48)
        yield


@pytest.fixture(scope="session")
def check_resharding(bits, random_tensor):
    """Saves tensors at one layout, loads them at another, and compares."""

    def check(tensors, *, save_layout, save_ranks, load_layout, load_ranks, verify, seed):
        rng = random.Random(seed)
        wholes = [random_tensor(shape, dtype, seed + index) for index, (shape, dtype) in enumerate(tensors)]
        saved = [layout_at_random(rng, save_layout, shape, dtype, save_ranks) for shape, dtype in tensors]
        wanted = [layout_at_random(rng, load_layout, shape, dtype, load_ranks) for shape, dtype in tensors]
        for whole, layout in zip(wholes, saved, strict=True):
            for shard in (shard for tensor in layout for shard in tensor.shards):
                shard.tensor.copy_(whole[shard.box.slices])

        def of_rank(layouts, rank):
            return {f"t{i}": layout[rank] for i, layout in enumerate(layouts)}

        with tempfile.TemporaryDirectory() as root:
            run_on_threads(lambda ranks: save(root, "a", of_rank(saved, ranks.rank), process_group=ranks), save_ranks)
            run_on_threads(
                lambda ranks: load(root, into=of_rank(wanted, ranks.rank), verify=verify, process_group=ranks),
                load_ranks,
            )

        for whole, layout in zip(wholes, wanted, strict=True):
            for shard in (shard for tensor in layout for shard in tensor.shards):
                assert bits(shard.tensor) == bits(whole[shard.box.slices])

    return check


@pytest.mark.pairs
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("save_layout", LAYOUTS)
@pytest.mark.parametrize("load_layout", LAYOUTS)
def test_every_layout_loads_at_every_other_with_the_same_bits(check_resharding, save_layout, load_layout, verify):
    tensors = [((8, 9), torch.float64), ((3, 4, 5), torch.bfloat16), ((50,), torch.int32)]

    for seed in range(4):
        check_resharding(
            tensors,
            save_layout=save_layout,
            save_ranks=1 + seed % 3,
            load_layout=load_layout,
            load_ranks=2,
            verify=verify,
            seed=seed,
        )


shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)


@settings(max_examples=150, deadline=None)
@given(
    tensors=st.lists(st.tuples(shapes, st.sampled_from(list(CODE_OF_DTYPE))), min_size=1, max_size=4),
    save_layout=st.sampled_from(LAYOUTS),
    load_layout=st.sampled_from(LAYOUTS),
    save_ranks=st.integers(1, 4),
    load_ranks=st.integers(1, 4),
    verify=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_layout_loads_at_any_other_with_the_same_bits(check_resharding, tensors, **how):
    check_resharding(tensors, **how)
