"""What training scripts import beside the documented API, in one process and on two ranks."""

import pytest
import torch
from neuronx_distributed.parallel_layers.grads import bucket_allreduce_gradients
from neuronx_distributed.parallel_layers.random import get_xla_rng_tracker, model_parallel_xla_manual_seed
from neuronx_distributed.parallel_layers.utils import (
    get_local_world_size,
    is_pjrt_device,
    move_all_tensor_to_cpu,
    param_is_not_tensor_parallel_duplicate,
    set_tensor_model_parallel_attributes,
    split_tensor_along_dim,
    split_tensor_along_last_dim,
)
from neuronx_distributed.utils import cpu_mode
from neuronx_distributed.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams
from neuronx_distributed.utils.model_utils import init_on_device
from nxd_state import destroy_model_parallel, initialize_model_parallel
from torch import nn


def trained(optimizer_class, dtype, steps=5, **arguments):
    weights = nn.Parameter(torch.linspace(-1, 1, 6, dtype=dtype))
    optimizer = optimizer_class([weights], lr=1e-2, **arguments)
    for step in range(steps):
        weights.grad = (weights.detach() * (step + 1)).cos()
        optimizer.step()
    return weights, optimizer


def test_adamw_with_float32_moments_is_torchs_where_nothing_decays():
    ours, _ = trained(AdamW_FP32OptimParams, torch.float64)
    torchs, _ = trained(torch.optim.AdamW, torch.float64, eps=1e-6, weight_decay=0.0)

    # Torch adds eps to the corrected root, the documented one before the correction.
    torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=0)


def test_adamw_decays_after_the_update():
    weights = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = AdamW_FP32OptimParams([weights], lr=0.1, weight_decay=0.5, correct_bias=False, betas=(0.0, 0.0))
    weights.grad = torch.full_like(weights, 2.0)

    optimizer.step()

    expected = (1 - 0.1 * 2 / (2 + 1e-6)) * (1 - 0.1 * 0.5)
    torch.testing.assert_close(weights.detach(), torch.full_like(weights, expected))


def test_adamw_moments_of_bfloat16_weights_are_float32_also_after_loading():
    weights, optimizer = trained(AdamW_FP32OptimParams, torch.bfloat16)
    again = AdamW_FP32OptimParams([weights])

    again.load_state_dict(optimizer.state_dict())

    for name in ("exp_avg", "exp_avg_sq"):
        assert again.state[weights][name].dtype == torch.float32
        assert torch.equal(again.state[weights][name], optimizer.state[weights][name])
    assert weights.dtype == torch.bfloat16


def test_adamw_refuses_numbers_out_of_range():
    with pytest.raises(ValueError, match=r"lr=-1, betas\[1\]=1\.5: lr, eps and weight_decay must be 0 or more"):
        AdamW_FP32OptimParams([nn.Parameter(torch.ones(1))], lr=-1, betas=(0.9, 1.5))


def test_gradients_are_averaged_and_streams_differ(run_ranks):
    def averaged():
        initialize_model_parallel()
        gradients = [torch.full((2, 3), 1.0), torch.tensor([4.0, 8.0], dtype=torch.float64)]
        if torch.distributed.get_rank():
            gradients = [3 * gradient for gradient in gradients]
        bucket_allreduce_gradients(gradients)
        destroy_model_parallel()
        return gradients

    def drawn():
        initialize_model_parallel(2)
        weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        model_parallel_xla_manual_seed(0)
        whole = torch.rand(4)
        with get_xla_rng_tracker().fork():
            own = torch.rand(4)
        set_tensor_model_parallel_attributes(weights[0], True, 0)
        counted = [param_is_not_tensor_parallel_duplicate(weight) for weight in weights]
        destroy_model_parallel()
        return whole, own, counted, weights[0].num_partitions

    for gradients in run_ranks(averaged, 2):
        assert gradients[0].unique().tolist() == [2.0]
        assert gradients[1].tolist() == [8.0, 16.0]
    (whole, own, first_counts, parts), (same, other, second_counts, _) = run_ranks(drawn, 2)
    assert torch.equal(whole, same)
    assert not torch.equal(own, other)
    assert (first_counts, second_counts, parts) == ([True, True], [True, False], 2)


def test_tensors_are_cut_evenly_or_refused():
    whole = torch.arange(12).view(2, 6)

    assert [part.tolist() for part in split_tensor_along_last_dim(whole, 3)][1] == [[2, 3], [8, 9]]
    assert all(part.is_contiguous() for part in split_tensor_along_dim(whole, 1, 2, contiguous_split_chunks=True))
    with pytest.raises(ValueError, match="6"):
        split_tensor_along_last_dim(whole, 4)
    assert torch.equal(move_all_tensor_to_cpu({"a": [whole, 1]})["a"][0], whole)


def test_model_is_made_without_memory_with_its_buffers():
    with init_on_device(torch.device("meta")):
        norm = nn.BatchNorm1d(3)

    assert norm.weight.is_meta
    assert norm.running_var.tolist() == [1.0] * 3
    with init_on_device("cpu"):
        assert not nn.Linear(2, 2).weight.is_meta


def test_host_is_described(monkeypatch):
    monkeypatch.setenv("NXD_DEVICE", "cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")

    assert (cpu_mode(), is_pjrt_device(), get_local_world_size()) == (True, False, 4)
