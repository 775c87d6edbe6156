"""Every collective on real ranks against what one process computes from all ranks' inputs."""

import itertools

import nxd_state
import pytest
import torch
import torch.distributed as dist
from nxd_testing import run_on_ranks

WORLD_SIZES = [2, 3, 4]
ADDED = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
MOVED = [*ADDED, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]

on_any_number_of_ranks = pytest.mark.parametrize("world_size", WORLD_SIZES)

LAYOUTS = {
    "contiguous": lambda whole: whole.contiguous(),
    "transposed": lambda whole: whole.transpose(0, -1).contiguous().transpose(0, -1),
    "every other": lambda whole: torch.stack([whole, whole], dim=-1)[..., 0],
}
REDUCTIONS = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}


def tensor_parallel_group():
    nxd_state.initialize_model_parallel(dist.get_world_size())
    return nxd_state.get_group("tp")


def inputs(world_size, dtype, layout="contiguous"):
    """Every rank's tensor, of small whole numbers that all dtypes can hold; each dim divides by `world_size`."""
    shape = (world_size, 2 * world_size, 3 * world_size)
    numel = torch.Size(shape).numel()
    wholes = [((torch.arange(numel) * 5 + 3 * rank) % 7).reshape(shape).to(dtype) for rank in range(world_size)]
    return [LAYOUTS[layout](whole) for whole in wholes]


def same_bytes(one, other):
    """Not every dtype has a comparison."""
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def assert_collective(call, tensors, group, expected):
    """`call` gives the expected tensor and leaves its input as it was."""
    mine = tensors[group.rank]
    before = mine.clone()

    found = call(mine)

    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert same_bytes(found, expected), f"{found} is not {expected}"
    assert same_bytes(mine, before)


def reduced(op, tensors):
    """The reduction in a dtype that loses nothing of small whole numbers, converted back."""
    return REDUCTIONS[op](torch.stack([tensor.double() for tensor in tensors])).to(tensors[0].dtype)


def ops_of(dtype):
    return [op for op in REDUCTIONS if op != "avg" or dtype.is_floating_point]


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", ADDED, ids=str)
@on_any_number_of_ranks
def test_all_reduce_any_dtype_combines_elementwise(world_size, dtype):
    def check():
        group = tensor_parallel_group()
        for op, layout in itertools.product(ops_of(dtype), LAYOUTS):
            tensors = inputs(group.size, dtype, layout)
            expected = reduced(op, tensors)
            assert_collective(lambda mine, op=op: nxd_state.all_reduce(mine, group, op=op), tensors, group, expected)

    run_on_ranks(check, world_size)


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", ADDED, ids=str)
@on_any_number_of_ranks
def test_all_reduce_in_place_any_dtype_writes_into_its_input(world_size, dtype):
    def check():
        group = tensor_parallel_group()
        for op, layout in itertools.product(ops_of(dtype), LAYOUTS):
            tensors = inputs(group.size, dtype, layout)
            mine = tensors[group.rank].clone(memory_format=torch.preserve_format)
            assert nxd_state.all_reduce_(mine, group, op=op) is mine
            assert torch.equal(mine, reduced(op, tensors))

    run_on_ranks(check, world_size)


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", ADDED, ids=str)
@on_any_number_of_ranks
def test_reduce_scatter_any_dtype_and_dim_keeps_own_part(world_size, dtype):
    def check():
        group = tensor_parallel_group()
        for op, layout, dim in itertools.product(ops_of(dtype), LAYOUTS, (0, 1, 2, -1)):
            tensors = inputs(group.size, dtype, layout)
            expected = reduced(op, tensors).chunk(group.size, dim)[group.rank]

            def call(mine, op=op, dim=dim):
                return nxd_state.reduce_scatter(mine, group, dim=dim, op=op)

            assert_collective(call, tensors, group, expected)

    run_on_ranks(check, world_size)


@pytest.mark.sample(9)
@pytest.mark.parametrize("dtype", MOVED, ids=str)
@on_any_number_of_ranks
def test_all_gather_any_dtype_and_dim_concatenates(world_size, dtype):
    def check():
        group = tensor_parallel_group()
        for layout, dim in itertools.product(LAYOUTS, (0, 1, 2, -1)):
            tensors = inputs(group.size, dtype, layout)
            expected = torch.cat(tensors, dim)
            assert_collective(
                lambda mine, dim=dim: nxd_state.all_gather(mine, group, dim=dim), tensors, group, expected
            )

    run_on_ranks(check, world_size)


@pytest.mark.sample(9)
@pytest.mark.parametrize("dtype", MOVED, ids=str)
@on_any_number_of_ranks
def test_all_gather_in_place_any_dtype_fills_its_input_with_the_parts_of_the_ranks(world_size, dtype):
    def check():
        group = tensor_parallel_group()
        tensors = inputs(group.size, dtype)
        mine = tensors[group.rank].clone()
        assert nxd_state.all_gather_(mine, group) is mine
        assert same_bytes(mine, torch.cat([tensor.chunk(group.size)[rank] for rank, tensor in enumerate(tensors)]))

    run_on_ranks(check, world_size)


@pytest.mark.sample(9)
@pytest.mark.parametrize("dtype", MOVED, ids=str)
@on_any_number_of_ranks
def test_all_to_all_any_dtype_and_dims_exchanges_parts(world_size, dtype):
    def check():
        group = tensor_parallel_group()
        for layout, (split, concat) in itertools.product(LAYOUTS, itertools.product((0, 1, -1), repeat=2)):
            tensors = inputs(group.size, dtype, layout)
            expected = torch.cat([tensor.chunk(group.size, split)[group.rank] for tensor in tensors], concat)

            def call(mine, split=split, concat=concat):
                return nxd_state.all_to_all(mine, group, split_dim=split, concat_dim=concat)

            assert_collective(call, tensors, group, expected)

    run_on_ranks(check, world_size)


@pytest.mark.sample(9)
@pytest.mark.parametrize("dtype", MOVED, ids=str)
@on_any_number_of_ranks
def test_broadcast_any_dtype_gives_the_tensor_of_the_source(world_size, dtype):
    def check():
        group = tensor_parallel_group()
        for layout, source in itertools.product(LAYOUTS, range(group.size)):
            tensors = inputs(group.size, dtype, layout)
            assert_collective(
                lambda mine, source=source: nxd_state.broadcast(mine, group, source=source),
                tensors,
                group,
                tensors[source],
            )

    run_on_ranks(check, world_size)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_send_and_recv_any_dtype_carry_the_tensor_round_the_ring(dtype):
    def check():
        group = tensor_parallel_group()
        for layout in LAYOUTS:
            tensors = inputs(group.size, dtype, layout)
            source, destination = (group.rank - 1) % group.size, (group.rank + 1) % group.size
            received = torch.empty_like(tensors[group.rank], memory_format=torch.contiguous_format)
            steps = [
                lambda tensor=tensors[group.rank], to=destination: nxd_state.send(tensor, group, destination=to),
                lambda buffer=received, of=source: nxd_state.recv(buffer, group, source=of),
            ]
            for step in steps if group.rank == 0 else reversed(steps):
                step()
            assert same_bytes(received, tensors[source])

    run_on_ranks(check, 3)


@on_any_number_of_ranks
def test_collectives_on_empty_tensors_keep_shape_and_dtype(world_size):
    def check():
        group = tensor_parallel_group()
        empty = torch.empty(0, 2 * group.size)
        assert nxd_state.all_reduce(empty, group).shape == empty.shape
        assert nxd_state.all_gather(empty, group, dim=1).shape == (0, 2 * group.size**2)
        assert nxd_state.reduce_scatter(empty, group, dim=0).shape == empty.shape
        assert nxd_state.reduce_scatter(empty, group, dim=1).shape == (0, 2)
        assert nxd_state.all_to_all(empty, group, split_dim=1, concat_dim=0).shape == (0, 2)
        assert nxd_state.all_to_all(empty, group, split_dim=0, concat_dim=0).shape == empty.shape
        assert nxd_state.broadcast(empty, group).shape == empty.shape

    run_on_ranks(check, world_size)


def test_collectives_on_scalars_keep_their_shape():
    def results():
        group = tensor_parallel_group()
        rank = torch.tensor(float(group.rank))
        return nxd_state.all_reduce(rank, group), nxd_state.broadcast(rank, group, source=2)

    assert run_on_ranks(results, 3) == [(torch.tensor(3.0), torch.tensor(2.0))] * 3


def test_collectives_on_conjugate_views_move_the_values():
    def check():
        group = tensor_parallel_group()
        mine = torch.tensor([1 + 2j, 3 - 1j]) * (group.rank + 1)
        expected = torch.cat([torch.tensor([1 - 2j, 3 + 1j]), torch.tensor([2 - 4j, 6 + 2j])])
        assert torch.equal(nxd_state.all_gather(mine.conj(), group), expected)
        assert torch.equal(nxd_state.broadcast(mine.conj(), group), expected[:2])

    run_on_ranks(check, 2)


def test_async_handles_waited_for_in_any_order_give_their_own_results():
    def check():
        group = tensor_parallel_group()
        tensors = inputs(group.size, torch.float32, "transposed")
        mine = tensors[group.rank]
        in_place = mine.clone(memory_format=torch.preserve_format)
        pending = {
            "all_reduce": nxd_state.all_reduce(mine, group, op="avg", async_op=True),
            "all_reduce_": nxd_state.all_reduce_(in_place, group, op="max", async_op=True),
            "all_gather": nxd_state.all_gather(mine, group, dim=1, async_op=True),
            "reduce_scatter": nxd_state.reduce_scatter(mine, group, dim=2, async_op=True),
            "all_to_all": nxd_state.all_to_all(mine, group, split_dim=2, concat_dim=0, async_op=True),
        }
        expected = {
            "all_reduce": reduced("avg", tensors),
            "all_reduce_": reduced("max", tensors),
            "all_gather": torch.cat(tensors, 1),
            "reduce_scatter": reduced("sum", tensors).chunk(group.size, 2)[group.rank],
            "all_to_all": torch.cat([tensor.chunk(group.size, 2)[group.rank] for tensor in tensors]),
        }
        for name in reversed(pending):
            first, again = pending[name].wait(), pending[name].wait()
            assert torch.equal(first, expected[name]), name
            assert again is first
        assert pending["all_reduce_"].wait() is in_place

    run_on_ranks(check, 3)


def test_collectives_on_crossing_groups_stay_within_each():
    def check():
        nxd_state.initialize_model_parallel(2)
        tp, dp = nxd_state.get_group("tp"), nxd_state.get_group("dp")
        rank = torch.tensor([float(dist.get_rank())])
        pending = [nxd_state.all_reduce(rank, group, async_op=True) for group in (tp, dp)]
        totals = [handle.wait().item() for handle in pending]
        return totals, nxd_state.all_gather(rank, tp).tolist(), nxd_state.all_gather(rank, dp).tolist()

    assert run_on_ranks(check, 4) == [
        ([1.0, 2.0], [0.0, 1.0], [0.0, 2.0]),
        ([1.0, 4.0], [0.0, 1.0], [1.0, 3.0]),
        ([5.0, 2.0], [2.0, 3.0], [0.0, 2.0]),
        ([5.0, 4.0], [2.0, 3.0], [1.0, 3.0]),
    ]


def test_all_gather_object_gives_every_ranks_value_in_group_order():
    def values():
        group = tensor_parallel_group()
        return nxd_state.all_gather_object({"rank": group.rank}, group)

    assert run_on_ranks(values, 3) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_barrier_holds_every_rank_until_the_last_has_come():
    def arrivals_seen_after():
        group = tensor_parallel_group()
        store = dist.distributed_c10d._get_default_store()
        store.add("arrived", 1)
        nxd_state.barrier(group)
        return store.add("arrived", 0)

    assert run_on_ranks(arrivals_seen_after, 4) == [4] * 4


def test_results_carry_no_gradient_even_where_inputs_do():
    def flags():
        group = tensor_parallel_group()
        weight = torch.ones(2, 2, requires_grad=True)
        results = [
            nxd_state.all_reduce(weight, group),
            nxd_state.all_gather(weight, group),
            nxd_state.reduce_scatter(weight, group),
            nxd_state.all_to_all(weight, group, split_dim=0, concat_dim=1),
            nxd_state.broadcast(weight, group),
        ]
        return [result.requires_grad for result in results]

    assert run_on_ranks(flags, 2) == [[False] * 5] * 2


def test_reduce_scatter_twice_is_bitwise_the_same():
    def check():
        group = tensor_parallel_group()
        generator = torch.Generator().manual_seed(group.rank)
        mine = torch.randn(3, 1000, generator=generator)
        first, second = (nxd_state.reduce_scatter(mine, group) for _ in range(2))
        assert torch.equal(first, second)

    run_on_ranks(check, 3)


GROUP_OF_ONE = nxd_state.Group.solo("tp")


@pytest.mark.parametrize(
    "call",
    [
        lambda x: nxd_state.all_reduce(x, GROUP_OF_ONE),
        lambda x: nxd_state.all_reduce_(x, GROUP_OF_ONE),
        lambda x: nxd_state.all_gather(x, GROUP_OF_ONE, dim=1),
        lambda x: nxd_state.reduce_scatter(x, GROUP_OF_ONE, dim=1),
        lambda x: nxd_state.all_to_all(x, GROUP_OF_ONE, split_dim=0, concat_dim=1),
        lambda x: nxd_state.broadcast(x, GROUP_OF_ONE),
        lambda x: nxd_state.all_reduce(x, GROUP_OF_ONE, async_op=True).wait(),
        lambda x: nxd_state.all_reduce_(x, GROUP_OF_ONE, async_op=True).wait(),
        lambda x: nxd_state.all_gather(x, GROUP_OF_ONE, async_op=True).wait(),
        lambda x: nxd_state.reduce_scatter(x, GROUP_OF_ONE, async_op=True).wait(),
        lambda x: nxd_state.all_gather_object(x, GROUP_OF_ONE)[0],
    ],
)
def test_collective_in_a_group_of_one_gives_the_tensor_itself(call):
    tensor = torch.ones(2, 3)

    assert call(tensor) is tensor


def test_barrier_in_a_group_of_one_returns():
    assert nxd_state.barrier(GROUP_OF_ONE) is None


@on_any_number_of_ranks
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reduce_scatter_mean_sums_in_float32_and_gives_each_rank_its_part(world_size, dtype):
    def average():
        group = tensor_parallel_group()
        tensors = [torch.linspace(-1, 1 + rank, 4 * world_size).to(dtype) for rank in range(world_size)]
        expected = torch.stack(tensors).float().mean(0).chunk(world_size)[group.rank]
        memory = torch.empty(4)
        arguments = {"sum_dtype": dtype, "dtype": torch.float32}

        plain = nxd_state.reduce_scatter_mean(tensors[group.rank], group, **arguments).wait()
        into_memory = nxd_state.reduce_scatter_mean(tensors[group.rank], group, **arguments, out=memory).wait()

        assert plain.dtype == torch.float32
        torch.testing.assert_close(plain, expected)
        assert torch.equal(into_memory, plain)
        assert into_memory.data_ptr() == memory.data_ptr()

    run_on_ranks(average, world_size)
