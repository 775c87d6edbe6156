"""How many collectives a decoder layer makes and how many bytes each rank sends for them: the least that will do."""

import sys
from pathlib import Path

import pytest
import torch
from nxd_state import initialize_model_parallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "bench"))

from layer_bench.decoder_layer import decoder_layer_traffic, least_bytes


def traffic(tp: int, sequence_parallel: bool, dtype: torch.dtype):
    initialize_model_parallel(tp)
    return decoder_layer_traffic(sequence_parallel, dtype)


@pytest.mark.sample(3)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoder_layer_makes_two_all_reduces_each_way_or_as_many_bytes_of_pairs(run_ranks, tp, dtype):
    least = least_bytes(tp, dtype)

    whole = run_ranks(traffic, tp, tp, False, dtype)
    split = run_ranks(traffic, tp, tp, True, dtype)

    assert whole == [(({"all-reduce": 2}, least),) * 2] * tp
    assert split == [(({"all-gather": 2, "reduce-scatter": 2}, least),) * 2] * tp
