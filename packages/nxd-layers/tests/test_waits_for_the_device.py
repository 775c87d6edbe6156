"""What a layer reads of a device's values, for which the host waits: experts once a layer, on one rank not at all.

On the CPU such functions of torch are counted. On fake tensors of a GPU, which have no values, they are errors.
"""

import pytest
import torch
from nxd_layers.experts import ExpertMLPs
from nxd_state import initialize_model_parallel
from nxd_testing import reads_of
from torch._subclasses.fake_tensor import FakeTensorMode

TOKENS, EXPERTS, TOP_K, HIDDEN = 12, 4, 2, 16

pytestmark = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "grouped_mm"), reason="without a grouped product, from torch 2.10 on, it is a loop"
)


def reads_of_a_step(dispatcher, ep=1):
    initialize_model_parallel(expert_model_parallel_size=ep)
    torch.manual_seed(0)
    mlps = ExpertMLPs(EXPERTS, TOP_K, HIDDEN, 32, hidden_act="silu", glu_mlp=True, dispatcher=dispatcher)
    tokens = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    index = torch.rand(TOKENS, EXPERTS).argsort(dim=1)[:, :TOP_K]
    weights = torch.rand(TOKENS, EXPERTS, requires_grad=True)
    return reads_of(lambda: mlps(tokens, weights, index).sum().backward())


def test_experts_of_one_rank_read_nothing(run_ranks):
    assert run_ranks(reads_of_a_step, 1, None) == [[]]


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
def test_experts_of_several_ranks_read_counts_once(run_ranks, dispatcher):
    assert run_ranks(reads_of_a_step, 2, dispatcher, 2) == [["tolist"]] * 2


@pytest.mark.skipif(torch.version.cuda is None, reason="a torch without CUDA cannot index fake tensors of a GPU")
def test_experts_on_a_gpu_read_nothing():
    with FakeTensorMode():
        mlps = ExpertMLPs(
            EXPERTS, TOP_K, HIDDEN, 32, hidden_act="silu", glu_mlp=True, dtype=torch.bfloat16, device="cuda"
        )
        tokens = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
        index = torch.empty(TOKENS, TOP_K, dtype=torch.int64, device="cuda")
        weights = torch.empty(TOKENS, EXPERTS, dtype=torch.bfloat16, device="cuda")
        with torch.no_grad():
            output = mlps(tokens, weights, index)

    assert (output.shape, output.dtype, output.device.type) == ((TOKENS, HIDDEN), torch.bfloat16, "cuda")
