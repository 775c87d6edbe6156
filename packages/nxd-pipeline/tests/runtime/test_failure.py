"""When one stage fails, all ranks end with its error, whether its own process goes on or not."""

import os

import pytest
from nxd_pipeline.model import NxDPPModel
from nxd_state import get_group, initialize_model_parallel
from nxd_testing import RankFailure


class Overflow(FloatingPointError):
    """What the failing layer raises."""


def fail(*_):
    raise Overflow("a layer overflowed")


def failing_pipeline(model, layer_class, *, layer, direction, schedule="1f1b"):
    """A pipeline of one layer per stage, of which one fails."""
    if direction == "forward":
        model.layers[layer].register_forward_hook(fail)
    else:
        model.layers[layer].linear.weight.register_hook(fail)
    return NxDPPModel(model, layer_class, 8, auto_partition=True, schedule=schedule)


@pytest.mark.pairs
@pytest.mark.parametrize("pipeline_size", [2, 4])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("stage", ["first", "middle", "last"])
def test_stage_that_fails_and_is_caught_ends_all_ranks_with_its_error(
    run_ranks, make_model, make_batch, layer_class, pipeline_size, direction, stage
):
    if stage == "middle" and pipeline_size == 2:
        pytest.skip("two stages have no middle")
    layer = {"first": 0, "middle": pipeline_size // 2, "last": pipeline_size - 1}[stage]

    def train():
        initialize_model_parallel(pipeline_model_parallel_size=pipeline_size)
        pipeline = failing_pipeline(make_model(num_layers=pipeline_size), layer_class, layer=layer, direction=direction)
        messages = []
        for _ in range(3):  # a rank that does not need the failed one any more learns of it in the next step
            try:
                pipeline.run_train(**make_batch())
            except (Overflow, RuntimeError) as error:
                messages.append(f"{type(error).__name__}: {error}")
        return messages[:2]

    results = run_ranks(train, pipeline_size, timeout=60.0)

    first = f"pipeline rank {layer} failed with Overflow: a layer overflowed"
    for rank, (message, later) in enumerate(results):
        own, other = "Overflow: a layer overflowed", f"PeerError: this rank stopped because {first}"
        assert message == (own if rank == layer else other)
        assert later.startswith(f"RuntimeError: this pipeline has ended: {first}. ")


def test_stage_that_fails_when_others_share_the_loss_already_ends_them_with_its_error(
    run_ranks, make_model, make_batch, layer_class
):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=4)
        model, backwards = make_model(), []

        def fail_at_the_end(gradient):
            backwards.append(gradient)
            if len(backwards) == 8:
                fail()

        model.layers[0].linear.weight.register_hook(fail_at_the_end)
        pipeline = NxDPPModel(model, layer_class, 8, auto_partition=True, broadcast_and_average_loss=True)
        try:
            for _ in range(2):  # who has the loss before it ends, learns of it in the next step
                pipeline.run_train(**make_batch())
        except (Overflow, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"

    own, *others = run_ranks(train, 4, timeout=60.0)

    assert own == "Overflow: a layer overflowed"
    for other in others:
        assert other == f"PeerError: this rank stopped because pipeline rank 0 failed with {own}"


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stage_whose_process_ends_ends_all_ranks_with_its_error(
    run_ranks, make_model, make_batch, layer_class, tmp_path, schedule
):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=4)
        pipeline = failing_pipeline(make_model(), layer_class, layer=2, direction="backward", schedule=schedule)
        try:
            pipeline.run_train(**make_batch())
        except Exception as error:
            (tmp_path / str(get_group("pp").rank)).write_text(f"{type(error).__name__}: {error}")
            os._exit(1)  # as a program does whose error nobody catches

    with pytest.raises(RankFailure):
        run_ranks(train, 4, timeout=60.0)

    messages = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    own = "Overflow: a layer overflowed"
    other = f"PeerError: this rank stopped because pipeline rank 2 failed with {own}"
    assert messages == [other, other, own, other]
