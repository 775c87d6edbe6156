"""Models of transformers written with parallel layers, as the examples of NeuronX Distributed are, on the meta device.

Their `param_init_fn` has parallel layers draw their own initial values, and does not know those of experts.
"""

from functools import partial

import neuronx_distributed as nxd
import pytest
import torch
import transformers
from neuronx_distributed.modules.moe.moe_parallel_layers import ExpertFusedColumnParallelLinear
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_state import destroy_model_parallel, get_group
from nxd_testing import assemble_logical, logical_pieces
from torch import nn

# So that what a layer's own method draws differs from what the plain layer of its kind would.
INIT = partial(nn.init.normal_, std=0.02)


class Scripted(transformers.PreTrainedModel):
    config_class = transformers.LlamaConfig

    def __init__(self, config, fuse_qkv):
        super().__init__(config)
        size = config.hidden_size
        copies = 2 if get_group("tp").size == 4 else 1
        self.table = ParallelEmbedding(config.vocab_size, size, init_method=INIT)
        if fuse_qkv is not None:
            self.qkv_proj = GQAQKVColumnParallelLinear(
                size, [size, size // 2], bias=False, init_method=INIT, kv_size_multiplier=copies, fuse_qkv=fuse_qkv
            )
        self.up_proj = ColumnParallelLinear(size, 2 * size, init_method=INIT)
        self.down_proj = RowParallelLinear(2 * size, size, init_method=INIT)
        self.experts = ExpertFusedColumnParallelLinear(2, size, size, init_method=INIT)
        self.router = nn.Linear(size, 2)
        self.post_init()


def fill_by_layers(module, device):
    if isinstance(module, nn.Linear):
        module.reset_parameters()
    elif isinstance(module, ParallelEmbedding | RowParallelLinear | ColumnParallelLinear):
        module.init_weight_cpu()
        if getattr(module, "bias", None) is not None:
            module.bias.data.zero_()
    elif isinstance(module, GQAQKVColumnParallelLinear):
        module.initialize_weight_biases()


def weights(tp, fuse_qkv):
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=tp, model_init_config={"meta_device_init": True, "param_init_fn": fill_by_layers}
    )
    torch.manual_seed(3)
    sizes = transformers.LlamaConfig(vocab_size=24, hidden_size=16, num_attention_heads=4)
    model = nxd.initialize_parallel_model(config, Scripted, sizes, fuse_qkv)
    pieces = logical_pieces([(name, it, it) for name, it in model.named_parameters()])
    destroy_model_parallel()
    return pieces


@pytest.mark.filterwarnings("ignore:kv_size_multiplier=2 without num_key_value_heads")
@pytest.mark.parametrize("fuse_qkv", [None, False, True])  # None: no such layer
def test_layers_draw_their_own_weights_alike_at_every_degree(run_ranks, fuse_qkv):
    expected = assemble_logical(run_ranks(weights, 1, 1, fuse_qkv))

    for tp in (2, 4):
        found = assemble_logical(run_ranks(weights, tp, tp, fuse_qkv))
        assert found.keys() == expected.keys()
        for name, whole in expected.items():
            torch.testing.assert_close(found[name], whole, msg=name, rtol=0, atol=0)
    for name, whole in expected.items():
        if name.endswith("bias") and not name.startswith("router"):
            assert not whole.any(), name
        elif not name.startswith("router"):
            assert whole.std().item() == pytest.approx(0.02, rel=0.2), name
