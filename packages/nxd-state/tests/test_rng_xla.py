"""Random streams on XLA: seeds are data of the graph, so ranks draw alike or apart from one graph."""

import nxd_state
import pytest
import torch
from nxd_testing import run_on_replicas
from nxd_testing.replicas import executed_graphs

pytestmark = pytest.mark.xla


def draws(steps: int):
    nxd_state.initialize_model_parallel(2)
    nxd_state.seed_model_parallel(7)
    device, found = nxd_state.get_device(), []
    for _ in range(steps):
        shared = torch.rand(5, device=device)
        with nxd_state.rng_stream("tp"):
            private = [torch.rand(5, device=device) for _ in range(2)]
        kept = torch.stack([shared, *private, torch.rand(5, device=device)])
        nxd_state.step_boundary()
        found.append(kept.cpu())
    return torch.stack(found), [graph.is_new for graph in executed_graphs()]


def test_shared_stream_is_the_same_on_tensor_parallel_ranks_and_the_other_is_not():
    (first, is_new), (second, _) = run_on_replicas(draws, 2, 3)

    shared, private = [0, 3], [1, 2]
    torch.testing.assert_close(first[:, shared], second[:, shared], rtol=0, atol=0)
    assert not torch.isin(first[:, private], second[:, private]).any()
    assert len(first.unique()) == first.numel()  # no number is drawn twice
    assert is_new == [True, False, False]


def test_saved_state_draws_the_same_again():
    def twice():
        nxd_state.seed_model_parallel(7)
        torch.rand(3, device=nxd_state.get_device())
        state, found = nxd_state.get_rng_state(), []
        for _ in range(2):
            nxd_state.set_rng_state(state)
            with nxd_state.rng_stream("tp"):
                found.append(torch.rand(3, device=nxd_state.get_device()))
            found.append(torch.rand(3, device=nxd_state.get_device()))
        nxd_state.step_boundary()
        return [it.cpu() for it in found]

    [(private, shared, private_again, shared_again)] = run_on_replicas(twice, 1)

    assert torch.equal(private, private_again)
    assert torch.equal(shared, shared_again)
    assert not torch.equal(private, shared)
