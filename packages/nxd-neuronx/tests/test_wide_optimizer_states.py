"""`AdamW_FP32OptimParams`: its states are float32 beside bfloat16 weights, and stay so through a checkpoint."""

import torch
from neuronx_distributed.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams
from nxd_engine import (
    initialize_parallel_model,
    initialize_parallel_optimizer,
    load_checkpoint,
    neuronx_distributed_config,
    save_checkpoint,
)
from nxd_state import destroy_model_parallel
from torch import nn


def build():
    config = neuronx_distributed_config()
    model = initialize_parallel_model(config, lambda: nn.Linear(3, 2).to(torch.bfloat16))
    return model, initialize_parallel_optimizer(config, AdamW_FP32OptimParams, model.parameters(), lr=0.01)


def test_optimizer_that_keeps_wide_states_gets_them_wide(tmp_path):
    model, optimizer = build()
    model(torch.ones(1, 3, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    save_checkpoint(tmp_path, "a", model, optimizer)
    other, its_optimizer = build()

    load_checkpoint(tmp_path, model=other, optimizer=its_optimizer)

    destroy_model_parallel()
    for parameter, expected in zip(other.parameters(), model.parameters(), strict=True):
        found = its_optimizer.state[parameter]["exp_avg"]
        assert found.dtype == torch.float32
        assert torch.equal(found, optimizer.state[expected]["exp_avg"])
