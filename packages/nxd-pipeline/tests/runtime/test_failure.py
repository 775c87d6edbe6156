"""When one stage fails, the ranks of the others end with its error."""

import os

import pytest
from nxd_pipeline.model import NxDPPModel
from nxd_state import get_group, initialize_model_parallel
from nxd_state.testing import RankFailure


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_stage_that_fails_ends_all_ranks_with_its_error(
    run_ranks, make_model, make_batch, layer_class, tmp_path, direction
):
    def fail(*_):
        raise FloatingPointError("layer 2 overflowed")

    def train():
        initialize_model_parallel(pipeline_model_parallel_size=4)
        model = make_model()
        if direction == "forward":
            model.layers[2].register_forward_hook(fail)
        else:
            model.layers[2].linear.weight.register_hook(fail)
        pipeline = NxDPPModel(model, layer_class, 4, auto_partition=True)
        try:
            pipeline.run_train(**make_batch())
        except Exception as error:
            (tmp_path / str(get_group("pp").rank)).write_text(f"{type(error).__name__}: {error}")
            os._exit(1)  # as a program does whose error nobody catches

    with pytest.raises(RankFailure):
        run_ranks(train, 4, timeout=20.0)

    messages = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    own = "FloatingPointError: layer 2 overflowed"
    other = f"RuntimeError: this rank stopped because pipeline rank 2 failed with {own}"
    assert messages == [other, other, own, other]
