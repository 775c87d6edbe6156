"""Arguments in the order and under the names of NeuronX Distributed, and those without effect here."""

import logging

import pytest
import torch
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.parallel_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    mappings,
)
from neuronx_distributed.parallel_layers.checkpointing import load, save
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_group
from neuronx_distributed.quantization.quantization_layers import QuantizedColumnParallel
from neuronx_distributed.trainer import load_checkpoint, save_checkpoint
from nxd_neuronx.arguments import say_without_effect
from nxd_state import initialize_model_parallel
from torch import nn

IN, OUT, VOCAB, HIDDEN = 8, 12, 12, 8


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_fifth_positional_argument_of_a_linear_layer_may_be_its_dtype(kind):
    fills_with_ones = nn.init.ones_

    layer = kind(IN, OUT, True, False, torch.bfloat16, None, 2, fills_with_ones, False, 1, True)

    assert (layer.weight.dtype, layer.stride, layer.sequence_dimension) == (torch.bfloat16, 2, 1)
    assert layer.master_weight.sum() == IN * OUT
    assert kind(IN, OUT, True, False, False, torch.bfloat16).weight.dtype == torch.bfloat16


def test_fifth_positional_argument_of_the_qkv_layer_may_be_its_dtype():
    layer = GQAQKVColumnParallelLinear(
        IN, [8, 4], False, False, torch.bfloat16, None, nn.init.ones_, False, True, 1, False
    )

    assert (layer.weight_q.dtype, layer.fuse_qkv) == (torch.bfloat16, False)
    assert layer.master_weight_v.shape == (4, IN)


def test_third_positional_argument_of_an_embedding_is_a_padding_token_or_fills_it():
    assert ParallelEmbedding(VOCAB, HIDDEN, 3).weight[3].count_nonzero() == 0
    assert ParallelEmbedding(VOCAB, HIDDEN, None).padding_idx is None
    assert ParallelEmbedding(VOCAB, HIDDEN, nn.init.ones_, torch.float64).weight.sum() == VOCAB * HIDDEN
    both = ParallelEmbedding(VOCAB, HIDDEN, 3, None, 2.0, False, False, nn.init.ones_, None, torch.float64, True)
    assert (both.weight.sum(), both.weight.dtype) == ((VOCAB - 1) * HIDDEN, torch.float64)
    assert both.shard_across_embedding


def test_positional_arguments_given_twice_or_too_many_raise():
    with pytest.raises(TypeError, match=r"multiple values for .*'padding_idx'"):
        ParallelEmbedding(VOCAB, HIDDEN, 3, padding_idx=3)
    with pytest.raises(TypeError, match="19 or fewer"):
        ParallelEmbedding(VOCAB, HIDDEN, *[None] * 18)


def test_argument_without_effect_is_said_once(caplog):
    say_without_effect.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            ParallelEmbedding(VOCAB, HIDDEN, sparse=True)

    assert [it.getMessage().partition(":")[0] for it in caplog.records] == ["sparse has no effect here"]


def test_a_device_that_is_a_bool_is_the_default_device():
    assert RowParallelLinear(IN, OUT, device=False).weight.device.type == "cpu"
    assert RowParallelLinear(IN, OUT, True, False, torch.float32, False).weight.device.type == "cpu"


def test_checkpoint_dir_str_is_another_name_of_path(tmp_path):
    save_checkpoint(checkpoint_dir_str=tmp_path, tag="a", user_content=1)

    assert load_checkpoint(checkpoint_dir_str=tmp_path) == 1
    with pytest.raises(TypeError, match="two names of one argument"):
        load_checkpoint(path=tmp_path, checkpoint_dir_str=tmp_path)


def test_files_of_ranks_are_saved_and_loaded_under_the_other_names(tmp_path):
    save(checkpoint={"a": torch.ones(2)}, output_dir=tmp_path)

    assert torch.equal(load(chkpt_path=tmp_path)["a"], torch.ones(2))


@pytest.mark.parametrize(
    "region", [mappings.scatter_to_tensor_model_parallel_region, mappings.gather_from_tensor_model_parallel_region]
)
def test_second_positional_argument_of_a_region_is_a_dim_or_a_process_group(run_ranks, region):
    def job():
        initialize_model_parallel(tensor_model_parallel_size=2)
        input_ = torch.arange(8.0).view(2, 4)
        assert torch.equal(region(input_, get_tensor_model_parallel_group()), region(input_, -1))
        assert torch.equal(region(input_, None), region(input_))
        assert not torch.equal(region(input_, 0), region(input_, -1))
        gathered = mappings.gather_from_sequence_parallel_region(input_, tile_cc=True)
        assert torch.equal(gathered, torch.cat([input_, input_]))

    run_ranks(job, 2)


def test_quantized_layers_are_made_from_their_float_ones_only():
    with pytest.raises(ValueError, match="from_float takes a ColumnParallelLinear; got a RowParallelLinear"):
        QuantizedColumnParallel.from_float(RowParallelLinear(IN, OUT))
    assert QuantizedColumnParallel.from_float(ColumnParallelLinear(IN, OUT)).weight.dtype == torch.int8
