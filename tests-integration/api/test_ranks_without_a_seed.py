"""Ranks that nobody has seeded alike train one model: they build it from the random state of rank 0."""

import pytest
import torch
from nxd_engine import initialize_parallel_model, initialize_parallel_optimizer, neuronx_distributed_config
from nxd_layers import ColumnParallelLinear, RowParallelLinear
from nxd_lora import LoraConfig
from nxd_state import active_group, initialize_model_parallel
from nxd_testing import assemble_logical, logical_pieces
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(4, 8, gather_output=False, dtype=torch.float64)
        self.down = RowParallelLinear(8, 4, input_is_parallel=True, dtype=torch.float64)
        self.router = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        return self.router(self.down(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.dropout(x).square().mean()


def trained(seeds, tp, pp, meta):
    """Pieces of the weights at the start and after a step, and the loss."""
    pipeline = {"transformer_layer_cls": Block, "auto_partition": True, "input_names": ["x"]}
    config = neuronx_distributed_config(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        pipeline_config=pipeline if pp > 1 else None,
        model_init_config={"meta_device_init": True, "param_init_fn": _fill} if meta else None,
        lora_config=None if meta else LoraConfig(lora_rank=2, target_modules=["router"]),
    )
    torch.manual_seed(seeds[active_group("dp").rank][active_group("tp").rank])
    model = initialize_parallel_model(config, Model)
    start = logical_pieces((name, it, it) for name, it in model.named_parameters())
    trains = [it for it in model.parameters() if it.requires_grad]
    optimizer = initialize_parallel_optimizer(config, torch.optim.SGD, [{"params": trains}], lr=0.1)
    loss = model.run_train(x=torch.ones(2, 4, dtype=torch.float64))
    optimizer.step()
    return start, logical_pieces((name, it, it) for name, it in model.named_parameters()), loss


def _fill(module):
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)


def _on_ranks(seeds, tp, pp, meta):
    initialize_model_parallel(tp, pp)
    return trained(seeds, tp, pp, meta)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_that_were_seeded_differently_train_the_model_of_rank_0(run_ranks, tp, pp, meta):
    starts, ends, losses = zip(*run_ranks(_on_ranks, 4, [[0, 1], [2, 3]], tp, pp, meta), strict=True)

    expected, *_ = run_ranks(_on_ranks, 1, [[0]], 1, 1, meta)
    if not meta:  # layers split a tensor, and the parameters of one that is filled on its rank are its own
        torch.testing.assert_close(assemble_logical(starts), assemble_logical([expected[0]]), rtol=0, atol=0)
    assemble_logical(ends)  # raises where ranks disagree
    if tp == 2:
        assert losses[0] == losses[1]  # they drop the same elements, and replicas others
        assert losses[0] != losses[2]
