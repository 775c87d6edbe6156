"""Debug mode: ranks that disagree raise, all of them, with both call sites; ranks that agree notice nothing."""

import re
from datetime import timedelta

import nxd_state
import pytest
import torch
import torch.distributed as dist
from nxd_state import CollectiveMismatch
from nxd_state.heartbeat import stop_heartbeat
from nxd_testing import RankFailure, run_on_ranks

DEBUG = {"NXD_DEBUG_COLLECTIVES": "1"}


def tensor_parallel_group():
    nxd_state.initialize_model_parallel(dist.get_world_size())
    return nxd_state.get_group("tp")


def messages_of(job, world_size):
    """What `job` raised on each rank, in debug mode."""

    def message():
        with pytest.raises(CollectiveMismatch) as raised:
            job()
        return str(raised.value)

    return run_on_ranks(message, world_size, env=DEBUG, timeout=20)


def on_rank_0(group):
    return group.rank == 0


def differs_in_operation():
    group = tensor_parallel_group()
    if on_rank_0(group):
        nxd_state.all_reduce(torch.ones(2), group)
    else:
        nxd_state.all_gather(torch.ones(2), group)


def differs_in_shape():
    group = tensor_parallel_group()
    nxd_state.all_reduce(torch.ones(2 if on_rank_0(group) else 3), group)


def differs_in_dtype():
    group = tensor_parallel_group()
    nxd_state.all_reduce(torch.ones(2, dtype=torch.float32 if on_rank_0(group) else torch.bfloat16), group)


def differs_in_reduction():
    group = tensor_parallel_group()
    nxd_state.all_reduce(torch.ones(2), group, op="sum" if on_rank_0(group) else "max")


def differs_in_dim():
    group = tensor_parallel_group()
    nxd_state.all_gather(torch.ones(2, 2), group, dim=0 if on_rank_0(group) else 1)


def differs_in_source():
    group = tensor_parallel_group()
    nxd_state.broadcast(torch.ones(2), group, source=0 if on_rank_0(group) else 1)


def differs_after_agreeing_collectives():
    group = tensor_parallel_group()
    for _ in range(5):
        nxd_state.all_reduce(torch.ones(2), group)
    if on_rank_0(group):
        nxd_state.barrier(group)
    else:
        nxd_state.all_gather_object("hello", group)


@pytest.mark.parametrize(
    ("job", "first", "second"),
    [
        (differs_in_operation, "all_reduce((2,), torch.float32, op=sum)", "all_gather((2,), torch.float32, dim=0)"),
        (differs_in_shape, "all_reduce((2,), torch.float32, op=sum)", "all_reduce((3,), torch.float32, op=sum)"),
        (differs_in_dtype, "all_reduce((2,), torch.float32, op=sum)", "all_reduce((2,), torch.bfloat16, op=sum)"),
        (differs_in_reduction, "all_reduce((2,), torch.float32, op=sum)", "all_reduce((2,), torch.float32, op=max)"),
        (differs_in_dim, "all_gather((2, 2), torch.float32, dim=0)", "all_gather((2, 2), torch.float32, dim=1)"),
        (differs_in_source, "broadcast((2,), torch.float32, source=0)", "broadcast((2,), torch.float32, source=1)"),
        (differs_after_agreeing_collectives, "barrier()", "all_gather_object()"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_mismatch_raises_on_every_rank_with_both_call_sites(job, first, second, world_size):
    messages = messages_of(job, world_size)

    for message in messages:
        assert f"rank 0: {first} in group tp {list(range(world_size))}" in message
        assert re.search(f"rank [12]: {re.escape(second)} in group tp", message)
        assert len(re.findall(rf"at \S*test_debug\.py:\d+ in {job.__name__} <- ", message)) == 2


def waits_in_another_group():
    nxd_state.initialize_model_parallel(2)
    if dist.get_rank() == 0:
        nxd_state.all_reduce(torch.ones(2), nxd_state.get_group("tp"))
    else:
        nxd_state.all_reduce(torch.ones(2), nxd_state.get_world_group())


def test_ranks_in_different_groups_raise_on_every_rank_with_both_call_sites():
    for message in messages_of(waits_in_another_group, 4):
        assert "ranks wait for each other in different groups" in message
        assert "rank 0: all_reduce((2,), torch.float32, op=sum) in group tp [0, 1]" in message
        assert "rank 1: all_reduce((2,), torch.float32, op=sum) in group pp+dp+cp+tp [0, 1, 2, 3]" in message
        assert message.count("in waits_in_another_group <- ") >= 2


def waits_in_a_circle():
    nxd_state.initialize_model_parallel(2)
    axis = "tp" if dist.get_rank() in (0, 3) else "dp"
    nxd_state.all_reduce(torch.ones(2), nxd_state.get_group(axis))


def test_ranks_that_wait_in_a_circle_of_four_raise_on_every_rank():
    messages = messages_of(waits_in_a_circle, 4)

    groups = ["tp [0, 1]", "dp [1, 3]", "dp [0, 2]", "tp [2, 3]"]
    for message in messages:
        for rank, group in enumerate(groups):
            assert f"rank {rank}: all_reduce((2,), torch.float32, op=sum) in group {group}" in message


def depends_on_ranks_that_disagree():
    nxd_state.initialize_model_parallel(2)
    tp, world = nxd_state.get_group("tp"), nxd_state.get_world_group()
    if dist.get_rank() in (0, 1):
        nxd_state.all_reduce(torch.ones(2 + dist.get_rank()), tp)
    nxd_state.barrier(world)


def test_rank_that_depends_on_ranks_that_disagree_raises_their_error():
    messages = messages_of(depends_on_ranks_that_disagree, 4)

    for message in messages:
        assert "rank 0: all_reduce((2,), torch.float32, op=sum) in group tp [0, 1]" in message
        assert "rank 1: all_reduce((3,), torch.float32, op=sum) in group tp [0, 1]" in message
    for message in messages[2:]:
        assert "will not reach this collective:\n" in message
        assert "barrier() in group pp+dp+cp+tp [0, 1, 2, 3]" in message


def sends_what_is_not_expected():
    group = tensor_parallel_group()
    if group.rank == 0:
        nxd_state.send(torch.ones(2), group, destination=1)
    else:
        nxd_state.recv(torch.empty(3), group, source=0)


def test_message_of_another_shape_than_received_raises_on_both_ranks():
    for message in messages_of(sends_what_is_not_expected, 2):
        assert "rank 0: send to recv((2,), torch.float32) in group tp [0, 1]" in message
        assert "rank 1: send to recv((3,), torch.float32) in group tp [0, 1]" in message


def both_send():
    group = tensor_parallel_group()
    nxd_state.send(torch.ones(2), group, destination=1 - group.rank)


def test_messages_that_nobody_receives_raise_on_both_ranks():
    for message in messages_of(both_send, 2):
        assert "ranks wait for each other in different groups" in message


def test_rank_that_never_comes_raises_after_the_timeout_saying_where_it_was_last():
    def job():
        group = tensor_parallel_group()
        nxd_state.all_reduce(torch.ones(2), group)
        if group.rank == 0:
            dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=2))
            with pytest.raises(CollectiveMismatch) as raised:
                nxd_state.barrier(group)
            return str(raised.value)
        return None

    message = run_on_ranks(job, 2, env=DEBUG, timeout=20)[0]

    assert "rank 1 did not reach this collective in 2 s:\n  rank 0: barrier()" in message
    assert "it last went on:\n  rank 1: all_reduce((2,), torch.float32, op=sum)" in message


def test_error_on_a_rank_that_shows_it_says_which_lines_disagree():
    with pytest.raises(RankFailure, match="CollectiveMismatch: ranks reached different collectives"):
        run_on_ranks(differs_in_shape, 2, env=DEBUG, timeout=20)


def exercise():
    """Every collective on crossing groups, many times over, ranks out of step; everything they gave."""
    nxd_state.initialize_model_parallel(2)
    tp, dp, world = nxd_state.get_group("tp"), nxd_state.get_group("dp"), nxd_state.get_world_group()
    x = torch.arange(8.0).reshape(4, 2) * (dist.get_rank() + 1)
    results = []
    for step in range(20):
        pending = nxd_state.all_reduce(x, dp, async_op=True)
        results.append(nxd_state.all_gather(x, tp, dim=1))
        results.append(nxd_state.reduce_scatter(x, world))
        results.append(pending.wait())
        results.append(nxd_state.all_to_all(x, tp, split_dim=0, concat_dim=1))
        results.append(nxd_state.broadcast(x, world, source=step % 4))
        if tp.rank == 0:
            nxd_state.send(x, tp, destination=1)
        else:
            results.append(nxd_state.recv(torch.empty(4, 2), tp, source=0))
        if step == dist.get_rank():  # one rank after the other falls behind
            torch.randn(300, 300) @ torch.randn(300, 300)
        nxd_state.barrier(dp)
    return results


def test_debug_mode_leaves_results_of_agreeing_ranks_unchanged():
    plain = run_on_ranks(exercise, 4)
    debugged = run_on_ranks(exercise, 4, env=DEBUG)

    for one, other in zip(plain, debugged, strict=True):
        assert len(one) == len(other)
        assert all(map(torch.equal, one, other))


def test_debug_mode_keeps_no_more_keys_the_longer_a_job_runs():
    def counts():
        group = tensor_parallel_group()
        store = dist.distributed_c10d._get_default_store()
        stop_heartbeat()  # its first message adds a key
        dist.barrier()
        found = []
        for _ in range(3):
            for _ in range(10):
                nxd_state.barrier(group)
            dist.barrier()
            found.append(store.num_keys())
            dist.barrier()
        return found

    for first, *_, last in run_on_ranks(counts, 2, env=DEBUG):
        assert first == last


def posts_anything():
    nxd_state.barrier(tensor_parallel_group())
    return dist.distributed_c10d._get_default_store().check(["nxd_debug/last/0"])


@pytest.mark.parametrize(
    ("environment", "posts"), [(DEBUG, True), ({}, False), ({"NXD_DEBUG_COLLECTIVES": "0"}, False)]
)
def test_debug_mode_posts_only_where_it_is_on(environment, posts):
    assert run_on_ranks(posts_anything, 2, env=environment) == [posts] * 2


def test_debug_mode_serves_meshes_made_one_after_the_other():
    def totals():
        found = []
        for degree in (2, 1, 2):
            nxd_state.initialize_model_parallel(degree)
            found.append(nxd_state.all_reduce(torch.ones(1), nxd_state.get_world_group()).item())
            nxd_state.destroy_model_parallel()
        return found

    assert run_on_ranks(totals, 2, env=DEBUG, timeout=20) == [[2.0] * 3] * 2
