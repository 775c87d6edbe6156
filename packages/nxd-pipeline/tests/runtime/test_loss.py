"""Where the loss is said to be, and what is none."""

import pytest
import torch
from nxd_pipeline.model import NxDPPModel
from nxd_pipeline.runtime.loss import check_loss_spec, pick_loss
from nxd_state import initialize_model_parallel
from torch import nn


@pytest.mark.parametrize(
    ("spec", "output"),
    [
        (None, 5),
        (True, 5),
        ((True, False), (5, 6)),
        ([False, True], [4, 5]),
        ({"loss": True, "logits": False}, {"logits": 6, "loss": 5}),
        ({"loss": True}, {"loss": 5, "more": 7}),
        ((False, True), {"logits": 6, "loss": 5}),
        ((False, {"losses": (False, True)}), (1, {"losses": (2, 5)})),
    ],
)
def test_spec_of_any_structure_picks_the_loss(spec, output):
    check_loss_spec(spec)

    assert pick_loss(output, spec) == 5


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (False, "is a bool"),
        ("loss", "is a str"),
        ((), "marks 0 values"),
        ({"loss": False}, "marks 0 values"),
        ((True, {"loss": True}), "marks 2 values"),
    ],
)
def test_pipeline_with_a_spec_that_marks_no_loss_raises_before_any_rank_waits(spec, message):
    with pytest.raises(ValueError, match=message):
        NxDPPModel(nn.Linear(2, 2), output_loss_value_spec=spec)


class CountsPositives(nn.Sequential):
    def forward(self, x):
        return (super().forward(x) > 0).sum()


def test_evaluation_that_counts_returns_the_counts_and_no_mean(run_ranks):
    def evaluate():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        torch.manual_seed(0)
        model, x = CountsPositives(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(6, 4)
        expected = [model(part) for part in x.chunk(2)]
        pipeline = NxDPPModel(model, nn.Linear, 2, auto_partition=True, broadcast_and_average_loss=True)
        return pipeline.run_eval(x=x), expected

    (first, _), (last, expected) = run_ranks(evaluate, 2, timeout=60.0)

    assert first is None
    assert last == expected


def test_training_by_a_schedule_for_evaluation_raises_on_every_rank_and_evaluation_goes_on(
    run_ranks, make_model, make_batch, layer_class
):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        pipeline = NxDPPModel(make_model(), layer_class, 2, auto_partition=True, schedule="inference")
        with pytest.raises(ValueError, match="'inference' has no backward"):
            pipeline.run_train(**make_batch())
        return pipeline.run_eval(**make_batch())

    _, loss = run_ranks(train, 2)

    torch.testing.assert_close(loss, make_model()(**make_batch()).detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_model_that_returns_the_loss_itself_trains_with_a_spec_of_true(
    run_ranks, make_model, make_batch, layer_class, num_stages
):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=num_stages)
        pipeline = NxDPPModel(make_model(), layer_class, 2, True, auto_partition=True)
        return pipeline.run_train(**make_batch())

    loss = run_ranks(train, num_stages)[-1]

    torch.testing.assert_close(loss, make_model()(**make_batch()).detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_shared_loss_has_the_dtype_of_the_models_loss_on_every_rank(
    run_ranks, make_model, make_batch, layer_class, num_stages, dtype
):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=num_stages)
        model = make_model().to(dtype)
        pipeline = NxDPPModel(model, layer_class, 2, auto_partition=True, broadcast_and_average_loss=True)
        return pipeline.run_train(**make_batch()).dtype

    assert run_ranks(train, num_stages) == [dtype] * num_stages


def test_forward_of_a_cut_model_says_what_to_call(run_ranks, make_model, make_batch, layer_class):
    def call():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        pipeline = NxDPPModel(make_model(), layer_class, auto_partition=True)
        with pytest.raises(RuntimeError, match=r"cut into 2 pipeline stages.*call run_train\(\*\*inputs\)"):
            pipeline(*make_batch().values())

    run_ranks(call, 2)


def test_forward_of_a_whole_model_takes_inputs_by_position(make_model, make_batch):
    model = make_model()

    assert torch.equal(NxDPPModel(model)(*make_batch().values()), model(**make_batch()))
