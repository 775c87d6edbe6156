"""Weights that several ranks hold are one weight."""

import pytest
from nxd_pipeline.model import NxDPPModel
from nxd_state import initialize_model_parallel


@pytest.mark.parametrize("call", ["run_train", "run_eval"])
def test_tied_weight_frozen_under_one_of_its_names_raises_on_all_ranks(
    run_ranks, make_model, make_batch, layer_class, call
):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        pipeline = NxDPPModel(make_model(tied=True), layer_class, 2, auto_partition=True)
        for name, parameter in pipeline.local_named_parameters():
            parameter.requires_grad_("embedding" not in name)
        with pytest.raises((ValueError, RuntimeError), match="set requires_grad to the same value on both"):
            getattr(pipeline, call)(**make_batch())

    run_ranks(train, 2, timeout=60.0)


def test_tied_weight_frozen_under_all_its_names_stays_without_gradient(run_ranks, make_model, make_batch, layer_class):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        pipeline = NxDPPModel(make_model(tied=True), layer_class, 2, auto_partition=True)
        for name, parameter in pipeline.local_named_parameters():
            parameter.requires_grad_(name not in ("embedding.weight", "head.weight"))
        pipeline.run_train(**make_batch())
        return {name: it.grad for name, it in pipeline.local_named_parameters()}

    first, last = run_ranks(train, 2)

    assert first["embedding.weight"] is None
    assert last["head.weight"] is None
    assert last["layers.3.linear.weight"] is not None
