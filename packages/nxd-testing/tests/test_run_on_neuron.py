"""The stand-in for the native `neuron` device: it computes what the CPU computes, and refuses what the device lacks."""

import nxd_state
import pytest
import torch
import torch.distributed as dist
from nxd_state import Receive, Send, get_device, get_group, initialize_model_parallel
from nxd_testing import RankFailure, run_on_neuron
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="the stand-in needs torch 2.13")


def trained() -> list[torch.Tensor]:
    """The weights of a small network after some steps of AdamW, with dropout and random inputs of the device."""
    torch.manual_seed(3)
    device = get_device()
    layers = (nn.Embedding(11, 8), nn.Linear(8, 6), nn.GELU(), nn.LayerNorm(6), nn.Dropout(), nn.Linear(6, 5))
    model = nn.Sequential(*layers).to(device)
    torch.manual_seed(4)  # the device's own stream has drawn nothing yet, that of the CPU the weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        ids = torch.randint(11, (4, 3), device=device)
        loss = F.cross_entropy(model(ids).transpose(1, 2), torch.randint(5, (4, 3), device=device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_training_on_the_stand_in_equals_that_of_the_cpu(run_ranks):
    assert_same(run_on_neuron(trained, 1), run_ranks(trained, 1))


def collectives() -> list[object]:
    """The result of each collective over two tensor-parallel ranks."""
    initialize_model_parallel(tensor_model_parallel_size=2)
    group, device = get_group("tp"), get_device()
    x = torch.arange(8.0, device=device).view(2, 4) + 10 * group.rank
    other = torch.empty_like(x)
    for message in nxd_state.batch_isend_irecv([Send(x, 1 - group.rank), Receive(other, 1 - group.rank)], group):
        message.wait()
    nxd_state.barrier(group)
    summed = x.clone()
    return [
        *(nxd_state.all_reduce(x, group, op=op) for op in ("sum", "avg", "max", "min")),
        nxd_state.all_reduce_(summed, group),
        nxd_state.all_gather(x.bfloat16(), group, dim=1),
        nxd_state.reduce_scatter(x, group, dim=0),
        nxd_state.reduce_scatter(x, group, dim=1, op="avg"),
        nxd_state.all_to_all(x, group, split_dim=1, concat_dim=0),
        nxd_state.broadcast(x, group, source=1),
        nxd_state.all_reduce(x[0, 0] * 2, group),
        other,
        nxd_state.all_gather_object(f"rank {group.rank}", group),
    ]


def test_collectives_of_the_stand_in_give_the_results_of_the_cpu(run_ranks):
    assert_same(run_on_neuron(collectives, 4), run_ranks(collectives, 4))


def arrivals_after_barriers() -> list[int]:
    """The number of ranks that had come to each of many barriers when this rank left it."""
    initialize_model_parallel(tensor_model_parallel_size=2)
    group, store = get_group("tp"), dist.distributed_c10d._get_default_store()
    arrivals = []
    for number in range(50):
        store.add(f"{group.ranks[0]}: barrier {number}", 1)
        nxd_state.barrier(group)
        arrivals.append(store.add(f"{group.ranks[0]}: barrier {number}", 0))
    return arrivals


def test_barrier_of_some_ranks_on_the_device_holds_each_until_the_last_has_come():
    assert run_on_neuron(arrivals_after_barriers, 4) == [[2] * 50] * 4


def streams() -> tuple[list[torch.Tensor], list[str]]:
    """What the model-parallel streams draw, again after their state was put back, and whose states there are."""
    initialize_model_parallel(tensor_model_parallel_size=2)
    nxd_state.seed_model_parallel(5)
    state, drawn = nxd_state.get_rng_state(), []
    for _ in range(2):
        nxd_state.set_rng_state(state)
        drawn.append(torch.rand(3, device=get_device()))
        with nxd_state.rng_stream("tp"):
            drawn.append(torch.rand(3, device=get_device()))
    return drawn, sorted(state["tp"])


def test_random_streams_of_the_device_are_saved_and_differ_between_ranks_in_the_tp_stream_only():
    (first, devices), (second, _) = run_on_neuron(streams, 2)

    assert devices == ["cpu", "neuron"]
    for drawn in (first, second):
        assert torch.equal(drawn[0], drawn[2])
        assert torch.equal(drawn[1], drawn[3])
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def chosen() -> tuple[str, str, bool, bool, torch.dtype, str, int]:
    initialize_model_parallel(tensor_model_parallel_size=2)
    device = get_device()
    traits = (nxd_state.is_lazy_device(), nxd_state.is_cpu(), nxd_state.widest_float(device))
    host = torch.arange(3)
    moved = nxd_state.read_later(nxd_state.send_to_device(host, device))()
    return str(device), dist.get_backend(), *traits, nxd_state.compile_backend(), int(moved.sum())


def test_device_and_its_traits_are_those_of_a_native_accelerator():
    expected = ("neuron:0", "neuron", False, False, torch.float32, "neuron", 3)

    assert run_on_neuron(chosen, 2) == [expected, expected]


REFUSED = {
    "float64": (lambda x: x.double(), "computed in 32 bits"),
    "float64 made there": (lambda x: torch.zeros(2, dtype=torch.float64, device=x.device), "computed in 32 bits"),
    "float64 sent there": (lambda x: torch.zeros(2, dtype=torch.float64).to(x.device), "computed in 32 bits"),
    "nonzero": (lambda x: x.nonzero(), "use torch.where|mask values instead"),
    "mask as index": (lambda x: x[x > 0], "use torch.where|mask values instead"),
    "two devices": (lambda x: x + torch.ones(3), "same device|several devices"),
    "index on the CPU": (lambda x: torch.index_select(x, 0, torch.tensor([0])), "same device|on the CPU"),
    "collective on the CPU": (lambda x: dist.all_reduce(torch.ones(1)), "the device's tensors only"),
    "barrier of some ranks": (lambda x: dist.barrier(dist.new_group([0])), "knows the world only"),
    "uneven all-to-all": (
        lambda x: dist.all_to_all_single(x[: 1 + dist.get_rank()], x, [1 + dist.get_rank()] * 2, [1, 2]),
        "chunks are of one size",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_stand_in_refuses_what_the_device_does_not_have(what):
    act, message = REFUSED[what]

    with pytest.raises(RankFailure, match=message):
        run_on_neuron(lambda: act(torch.ones(3, device="neuron")), 2)


def test_device_that_is_printed_and_saved_keeps_its_values(tmp_path):
    def printed_and_saved() -> tuple[str, torch.Tensor]:
        x = torch.tensor([1.5, 2.0], device="neuron")
        torch.save({"x": x}, tmp_path / "x.pt")
        return repr(x), torch.load(tmp_path / "x.pt", map_location="cpu")["x"]

    [(text, loaded)] = run_on_neuron(printed_and_saved, 1)

    assert text == "tensor([1.5000, 2.0000], device='neuron:0')"
    assert loaded.tolist() == [1.5, 2.0]


def assert_same(found: list[list[object]], expected: list[list[object]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            if isinstance(one, torch.Tensor):
                torch.testing.assert_close(one, other)  # torch's optimizers take other, equal, steps on accelerators
            else:
                assert one == other
