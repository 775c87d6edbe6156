"""Arguments that make no sense raise before anything is sent, in a group of one as in a larger one."""

import nxd_state
import pytest
import torch
from nxd_testing import run_on_ranks

TENSOR = torch.ones(4, 5)
PAIR = nxd_state.Group("tp", ranks=(0, 1), rank=0, replica_groups=((0, 1),))
SOLO = nxd_state.Group.solo("tp")

in_any_group = pytest.mark.parametrize("group", [SOLO, PAIR], ids=["one", "two"])


@in_any_group
@pytest.mark.parametrize("dim", [2, -3])
@pytest.mark.parametrize(
    "call",
    [
        lambda group, dim: nxd_state.all_gather(TENSOR, group, dim=dim),
        lambda group, dim: nxd_state.reduce_scatter(TENSOR, group, dim=dim),
        lambda group, dim: nxd_state.all_to_all(TENSOR, group, split_dim=dim, concat_dim=0),
        lambda group, dim: nxd_state.all_to_all(TENSOR, group, split_dim=0, concat_dim=dim),
    ],
    ids=["all_gather", "reduce_scatter", "all_to_all split", "all_to_all concat"],
)
def test_dim_outside_the_tensor_raises(call, dim, group):
    with pytest.raises(ValueError, match=rf"dim={dim} is outside a tensor of shape \(4, 5\); use -2\.\.1"):
        call(group, dim)


def test_dim_of_a_scalar_raises():
    with pytest.raises(ValueError, match=r"dim=0 is outside a tensor of shape \(\); reshape it to \(1,\)"):
        nxd_state.all_gather(torch.tensor(1.0), PAIR)


@pytest.mark.parametrize(
    "call",
    [
        lambda: nxd_state.reduce_scatter(TENSOR, PAIR, dim=1),
        lambda: nxd_state.all_to_all(TENSOR, PAIR, split_dim=-1, concat_dim=0),
    ],
    ids=["reduce_scatter", "all_to_all"],
)
def test_dim_that_the_group_does_not_divide_raises_saying_what_to_pad_to(call):
    with pytest.raises(ValueError, match=r"2 ranks does not divide dim 1 of shape \(4, 5\); pad it to 6"):
        call()


@in_any_group
@pytest.mark.parametrize(
    "call",
    [
        lambda group, **op: nxd_state.all_reduce(TENSOR, group, **op),
        lambda group, **op: nxd_state.all_reduce_(TENSOR, group, **op),
        lambda group, **op: nxd_state.reduce_scatter(TENSOR, group, **op),
    ],
    ids=["all_reduce", "all_reduce_", "reduce_scatter"],
)
def test_unknown_op_raises_naming_those_there_are(call, group):
    with pytest.raises(ValueError, match="op='mean' is not a reduction; use one of sum, avg, max, min"):
        call(group, op="mean")


@in_any_group
@pytest.mark.parametrize("reduce", [nxd_state.all_reduce, nxd_state.all_reduce_, nxd_state.reduce_scatter])
def test_average_of_integers_raises(reduce, group):
    with pytest.raises(ValueError, match=r"op=.avg. of torch\.int64 has no result of that dtype; use op=.sum."):
        reduce(torch.ones(4, dtype=torch.int64), group, op="avg")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nxd_state.broadcast(TENSOR, SOLO, source=1), r"source=1 is outside Group.*use an index.*0\.\.0"),
        (lambda: nxd_state.broadcast(TENSOR, PAIR, source=-1), r"source=-1 is outside Group.*0\.\.1"),
        (lambda: nxd_state.send(TENSOR, PAIR, destination=2), r"destination=2 is outside Group.*0\.\.1"),
        (lambda: nxd_state.send(TENSOR, PAIR, destination=0), "destination=0 is this rank itself"),
        (lambda: nxd_state.recv(TENSOR, PAIR, source=2), r"source=2 is outside Group.*0\.\.1"),
        (lambda: nxd_state.recv(TENSOR, PAIR, source=0), "source=0 is this rank itself"),
        (lambda: nxd_state.recv(TENSOR.t(), PAIR, source=1), r"non-contiguous tensor of shape \(5, 4\)"),
        (
            lambda: nxd_state.all_gather_(TENSOR[:3], PAIR),
            r"2 ranks does not divide dim 0 of shape \(3, 5\); pad it to 4",
        ),
        (lambda: nxd_state.all_gather_(TENSOR[:, :4].t(), PAIR), r"non-contiguous tensor of shape \(4, 4\)"),
        (lambda: nxd_state.all_gather_(torch.zeros(2, dtype=torch.complex64).conj(), PAIR), "conjugate view"),
        (lambda: nxd_state.all_gather_(torch.tensor(1.0), SOLO), r"dim=0 is outside a tensor of shape \(\)"),
        (lambda: nxd_state.isend(TENSOR, PAIR, destination=2), r"destination=2 is outside Group.*0\.\.1"),
        (lambda: nxd_state.irecv(TENSOR, PAIR, source=0), "source=0 is this rank itself"),
        (lambda: nxd_state.irecv(TENSOR.t(), PAIR, source=1), r"non-contiguous tensor of shape \(5, 4\)"),
        (
            lambda: nxd_state.batch_isend_irecv([nxd_state.Send(TENSOR, 1), nxd_state.Receive(TENSOR, 2)], PAIR),
            r"source=2 is outside Group.*0\.\.1",
        ),
    ],
)
def test_peer_or_buffer_that_cannot_serve_raises(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bad_argument_on_every_rank_leaves_the_group_usable():
    def total():
        nxd_state.initialize_model_parallel(3)
        group = nxd_state.get_group("tp")
        with pytest.raises(ValueError, match="does not divide"):
            nxd_state.reduce_scatter(torch.ones(4), group)
        return nxd_state.all_reduce(torch.ones(1), group).item()

    assert run_on_ranks(total, 3) == [3.0] * 3
