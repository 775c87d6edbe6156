"""Rows of several documents, told by positions that begin anew, under context parallelism: the loss of one process."""

import pytest
import torch
from hf_survey.architectures import tiny_batch, tiny_model
from nxd_layers.hf import parallelize
from nxd_layers.hf.supported_models import COMPARED_CONTEXT
from nxd_parity import InFloat64
from nxd_state import initialize_model_parallel

# Those whose masks are told no positions, one with a state, and one that keeps documents apart without a cache.
QUICK = ["afmoe", "gpt_oss", "granitemoehybrid", "qwen3"]
POSITIONS = torch.tensor([[*range(5), *range(8)], [*range(2), *range(11)]])


def losses(model_type, *, is_cut):
    """Without and with a cache, which is made where the config asks for it and decides whether documents are apart."""
    found = []
    for use_cache in (False, True):
        model = tiny_model(model_type)
        model.config.use_cache = use_cache
        batch = {name: it[: len(POSITIONS)] for name, it in tiny_batch(model_type).items()}
        with InFloat64():
            model = parallelize(model) if is_cut else model
            found.append(model(**batch, position_ids=POSITIONS).loss.item())
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(it, marks=() if it in QUICK else pytest.mark.slow) for it in sorted(COMPARED_CONTEXT)],
)
def test_packed_rows_that_are_cut_have_the_loss_of_one_process(run_ranks, model_type):
    def job():
        initialize_model_parallel(context_parallel_size=2)
        return losses(model_type, is_cut=True)

    expected = losses(model_type, is_cut=False)

    assert run_ranks(job, 2) == [pytest.approx(expected, rel=1e-10)] * 2
