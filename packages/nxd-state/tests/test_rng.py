"""Random numbers: which ranks draw the same, which differ, and that every stream goes on where it was saved."""

import nxd_state
import pytest
import torch
import torch.distributed as dist
from nxd_state import rng
from nxd_testing import run_on_ranks
from torch.nn import functional as F


@pytest.fixture
def unseeded(monkeypatch):
    """No streams at the start, and the generator as it was at the end."""
    state = torch.get_rng_state()
    monkeypatch.setattr(rng, "_streams", rng._Streams())
    yield
    torch.set_rng_state(state)


def draws():
    """One draw of the shared stream and one of the stream of each tensor-parallel rank."""
    shared = torch.rand(8)
    with nxd_state.rng_stream("tp"):
        own = torch.rand(8)
    return shared, own


def seeded_draws(tensor_parallel, pipeline, context=1):
    nxd_state.initialize_model_parallel(tensor_parallel, pipeline, context_parallel_size=context)
    nxd_state.seed_model_parallel(1234)
    return draws()


@pytest.mark.parametrize(
    ("degrees", "shared_alike"),
    [
        ((2, 1), [(0, 1), (2, 3)]),  # tensor parallel x data parallel
        ((2, 2), [(0, 1), (2, 3)]),  # tensor parallel x pipeline
        ((2, 1, 2), [(0, 1), (2, 3)]),  # tensor parallel x context parallel
        ((4, 1), [(0, 1, 2, 3)]),
        ((1, 1), [(0,), (1,), (2,), (3,)]),
    ],
)
def test_shared_stream_is_alike_in_a_tensor_parallel_group_and_nowhere_else(degrees, shared_alike):
    by_rank = run_on_ranks(seeded_draws, 4, *degrees)

    shared = [tuple(shared.tolist()) for shared, _ in by_rank]
    own = [tuple(own.tolist()) for _, own in by_rank]
    alike = [tuple(rank for rank in range(4) if shared[rank] == value) for value in dict.fromkeys(shared)]
    assert alike == shared_alike
    assert len(set(own) | set(shared)) == 4 + len(shared_alike)


def test_dropout_drops_alike_outside_the_stream_and_differently_inside():
    def masks():
        nxd_state.initialize_model_parallel(2)
        nxd_state.seed_model_parallel(0)
        ones = torch.ones(64)
        outside = F.dropout(ones, 0.5)
        with nxd_state.rng_stream("tp"):
            inside = F.dropout(ones, 0.5)
        return outside, inside, F.dropout(ones, 0.5)

    (outside_0, inside_0, after_0), (outside_1, inside_1, after_1) = run_on_ranks(masks, 2)

    assert torch.equal(outside_0, outside_1)
    assert not torch.equal(inside_0, inside_1)
    assert torch.equal(after_0, after_1)


def test_saved_streams_go_on_bitwise_on_every_rank():
    def check():
        nxd_state.initialize_model_parallel(2)
        nxd_state.seed_model_parallel(7)
        draws()
        state = nxd_state.get_rng_state()
        expected = [*draws(), *draws()]
        nxd_state.seed_model_parallel(8)  # as a new process that resumes would
        draws()
        nxd_state.set_rng_state(state)
        assert all(map(torch.equal, [*draws(), *draws()], expected))
        assert dist.get_world_size() == 2

    run_on_ranks(check, 2)


def test_streams_are_those_of_the_seed_wherever_the_generator_was(unseeded):
    nxd_state.seed_model_parallel(5)
    first = draws()
    torch.rand(100)
    nxd_state.seed_model_parallel(5)

    assert all(map(torch.equal, draws(), first))


def test_neighbouring_seeds_give_other_numbers(unseeded):
    found = []
    for seed in (5, 6):
        nxd_state.seed_model_parallel(seed)
        found += [tuple(draw.tolist()) for draw in draws()]

    assert len(set(found)) == 4


def test_stream_goes_on_where_it_left_off_and_leaves_the_shared_one_alone(unseeded):
    nxd_state.seed_model_parallel(5)
    shared, own = torch.rand(4), None
    with nxd_state.rng_stream("tp"):
        own = torch.rand(4)

    nxd_state.seed_model_parallel(5)
    halves = []
    shared_halves = [torch.rand(2)]
    for _ in range(2):
        with nxd_state.rng_stream("tp"):
            halves.append(torch.rand(2))
    shared_halves.append(torch.rand(2))

    assert torch.equal(torch.cat(halves), own)
    assert torch.equal(torch.cat(shared_halves), shared)


def test_stream_is_left_where_an_exception_ended_it(unseeded):
    nxd_state.seed_model_parallel(5)
    expected_shared, expected_own = torch.rand(2), None
    with nxd_state.rng_stream("tp"):
        torch.rand(2)
        expected_own = torch.rand(2)

    nxd_state.seed_model_parallel(5)
    with pytest.raises(KeyError), nxd_state.rng_stream("tp"):  # noqa: PT012 - the draw comes before the error
        torch.rand(2)
        raise KeyError

    assert torch.equal(torch.rand(2), expected_shared)
    with nxd_state.rng_stream("tp"):
        assert torch.equal(torch.rand(2), expected_own)


def test_saved_state_is_not_changed_by_later_draws(unseeded):
    nxd_state.seed_model_parallel(5)
    state = nxd_state.get_rng_state()
    copies = {name: {kind: tensor.clone() for kind, tensor in states.items()} for name, states in state.items()}

    draws()

    assert set(state) == {"default", "tp"}
    assert all(torch.equal(state[name][kind], copy) for name in copies for kind, copy in copies[name].items())


def test_saved_state_survives_a_checkpoint_file(unseeded, tmp_path):
    nxd_state.seed_model_parallel(5)
    torch.save(nxd_state.get_rng_state(), tmp_path / "rng.pt")
    expected = draws()

    nxd_state.set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))

    assert all(map(torch.equal, draws(), expected))


def test_stream_before_seeding_raises(unseeded):
    with (
        pytest.raises(RuntimeError, match=r"not seeded; call seed_model_parallel\(seed\) after"),
        nxd_state.rng_stream("tp"),
    ):
        pass


def test_unknown_stream_raises_naming_those_there_are(unseeded):
    nxd_state.seed_model_parallel(5)

    with pytest.raises(ValueError, match=r"unknown random stream 'dp'; use one of tp"), nxd_state.rng_stream("dp"):
        pass


def test_state_without_a_shared_stream_raises():
    with pytest.raises(ValueError, match=r"random state has streams .* expected 'default' among them"):
        nxd_state.set_rng_state({"tp": {}})


@pytest.mark.parametrize("seeded_before_the_first_mesh", [False, True])
def test_streams_of_another_mesh_are_not_drawn_from(seeded_before_the_first_mesh):
    def job():
        if seeded_before_the_first_mesh:
            nxd_state.seed_model_parallel(3)
        nxd_state.initialize_model_parallel(2)
        if not seeded_before_the_first_mesh:
            nxd_state.seed_model_parallel(3)
            nxd_state.destroy_model_parallel()
            nxd_state.initialize_model_parallel(2)
        with pytest.raises(RuntimeError, match=r"not seeded; call seed_model_parallel\(seed\) after"):
            draws()
        return list(nxd_state.get_rng_state())

    assert run_on_ranks(job, 2) == [["default"]] * 2
