import math

import pytest
from nxd_ckpt.boxes import Box, uncovered
from nxd_ckpt.manifest import Chunk
from nxd_ckpt.plan import TensorDescription, plan_read, plan_save


def rows(rank, world_size, shape):
    count = shape[0] // world_size
    box = Box((rank * count,) + (0,) * (len(shape) - 1), (count, *shape[1:]))
    return TensorDescription("BF16", shape, (box,))


def whole(shape, dtype="F32"):
    return TensorDescription(dtype, shape, (Box.whole(shape),))


def written_bytes(plan):
    return [sum(write.num_bytes for write in writes) for writes in plan.writes]


def test_plan_save_replicas_are_written_once_and_spread():
    sizes = [7, 1, 3, 3, 5, 1]
    state = {f"w{i}": whole((size, 100)) for i, size in enumerate(sizes)}

    plan = plan_save([state] * 4)

    written = [write.name for writes in plan.writes for write in writes]
    assert sorted(written) == sorted(state)
    assert written_bytes(plan) == [2800, 2000, 1600, 1600]


def test_plan_save_large_replica_is_split_over_its_holders():
    shape = (3, 5, 8 * 2**20)

    plan = plan_save([{"w": whole(shape)}] * 4)

    boxes = [write.box for writes in plan.writes for write in writes]
    assert [len(writes) for writes in plan.writes] == [1, 1, 1, 0]  # it has three rows
    assert uncovered(Box.whole(shape), boxes) == []
    assert written_bytes(plan) == [4 * math.prod(shape) // 3] * 3 + [0]


def test_plan_save_replica_goes_to_the_holder_without_own_shards_even_if_it_is_larger():
    busy = {"own": whole((4,)), "shared": whole((8,))}
    free = {"shared": whole((8,))}

    plan = plan_save([busy, free])

    assert [[write.name for write in writes] for writes in plan.writes] == [["own"], ["shared"]]


def test_plan_save_box_held_twice_by_one_rank_is_written_once():
    twice = TensorDescription("F32", (2,), (Box((0,), (2,)), Box((0,), (2,))))

    plan = plan_save([{"w": twice}])

    assert len(plan.writes[0]) == 1


def test_plan_save_thousand_ranks_writes_every_element_once_and_evenly():
    tp, dp = 8, 125
    layers = {f"layers.{i}.weight": (4096, 1024) for i in range(20)}
    norms = {f"layers.{i}.norm": (1024,) for i in range(20)}
    states = [
        {name: rows(rank % tp, tp, shape) for name, shape in layers.items()}
        | {name: whole(shape, "BF16") for name, shape in norms.items()}
        for rank in range(tp * dp)
    ]

    plan = plan_save(states)

    boxes = {}
    for rank, writes in enumerate(plan.writes):
        for write in writes:
            assert write.box in states[rank][write.name].boxes
            boxes.setdefault(write.name, []).append(write.box)
    for name, shape in (layers | norms).items():
        assert uncovered(Box.whole(shape), boxes[name]) == []
        assert sum(box.num_elements for box in boxes[name]) == math.prod(shape)
    assert max(written_bytes(plan)) == 4096 * 1024 * 2 // tp


def test_plan_save_ranks_that_disagree_lists_every_difference():
    first = {"a": whole((2,)), "b": whole((2, 2)), "c": whole((1,))}
    second = {"a": whole((2,), "BF16"), "b": whole((2, 3)), "c": whole((1,))}

    with pytest.raises(ValueError, match="do not fit together") as error:
        plan_save([first, second])

    assert "'a' is F32 [2] on rank 0 but BF16 [2] on rank 1" in str(error.value)
    assert "'b' is F32 [2, 2] on rank 0 but F32 [2, 3] on rank 1" in str(error.value)
    assert "'c'" not in str(error.value)


def test_plan_save_elements_held_by_nobody_names_the_box():
    state = [{"w": rows(rank, 4, (8, 2))} for rank in (0, 1, 3)]

    with pytest.raises(ValueError, match=r"'w' \[8, 2\]: no rank holds \[4:6,0:2\]"):
        plan_save(state)


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_plan_save_empty_and_scalar_tensors_are_complete(shape):
    plan = plan_save([{"w": whole(shape)}, {"w": TensorDescription("F32", shape, ())}])

    assert sum(map(len, plan.writes)) == (1 if shape == () else 0)


def test_plan_read_overlapping_chunks_gives_each_element_once():
    chunks = [Chunk("file", 0, 0, Box((start,), (4,)), ()) for start in (0, 2, 4, 8)]

    reads, missing = plan_read(Box((1,), (10,)), chunks)

    assert [read.box for read in reads] == [Box((1,), (3,)), Box((4,), (2,)), Box((6,), (2,)), Box((8,), (3,))]
    assert missing == []


def test_plan_read_hole_between_chunks_is_reported():
    chunks = [Chunk("file", 0, 0, Box((start, 0), (2, 4)), ()) for start in (0, 4)]

    reads, missing = plan_read(Box((1, 1), (4, 2)), chunks)

    assert [read.box for read in reads] == [Box((1, 1), (1, 2)), Box((4, 1), (1, 2))]
    assert missing == [Box((2, 1), (2, 2))]
