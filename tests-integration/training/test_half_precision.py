"""Llama in bfloat16 and float16 on several ranks: as near to float32 as the same model in one process."""

import pytest
import torch
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_state import initialize_model_parallel
from nxd_testing import assemble_logical, logical_pieces

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
)
ORDER_OF_SUMS = 1.2  # what the ranks' sums may add to the error, see test_half_precision of nxd-layers


def gradients(tp: int, sequence_parallel: bool, dtype: torch.dtype, weights_dtype: torch.dtype):
    """Gradients of the loss in `dtype`, with weights that `weights_dtype` can hold."""
    initialize_model_parallel(tensor_model_parallel_size=tp)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG, sequence_parallel=sequence_parallel, dtype=weights_dtype).to(dtype)
    tokens = torch.randint(0, 128, (4, 33), generator=torch.Generator().manual_seed(1))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    return logical_pieces((n, p, p.grad) for n, p in model.named_parameters() if p.dim() > 1)


def error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Root mean square of the differences, each tensor as a share of its own."""
    shares = [((found[name].double() - exact[name]).norm() / exact[name].norm()).item() for name in exact]
    return sum(share**2 for share in shares) ** 0.5 / len(shares) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_as_near_to_float32_as_in_one_process(run_ranks, dtype):
    exact = assemble_logical(run_ranks(gradients, 1, 1, False, torch.float32, dtype))
    exact = {name: tensor.double() for name, tensor in exact.items()}
    one_process = error(assemble_logical(run_ranks(gradients, 1, 1, False, dtype, dtype)), exact)

    for tp, sequence_parallel in [(2, False), (2, True), (4, False), (4, True)]:
        found = assemble_logical(run_ranks(gradients, tp, tp, sequence_parallel, dtype, dtype))
        assert error(found, exact) <= ORDER_OF_SUMS * one_process, (tp, sequence_parallel)
