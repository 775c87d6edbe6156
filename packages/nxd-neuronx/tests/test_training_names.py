"""The names that training scripts import and that compute: models, batches, values, stages."""

import neuronx_distributed as nxd
import pytest
import torch
from neuronx_distributed.kernels import nki_flash_attn_func, nki_ring_attn_func
from neuronx_distributed.modules.lora import LoraConfig, LoraModel, get_lora_model
from neuronx_distributed.operators import argmax
from neuronx_distributed.operators.topk import topk
from neuronx_distributed.overrides.transformer_overrides import apply_rotary_pos_emb
from neuronx_distributed.pipeline import manual_pipe_stage, partition, trace
from neuronx_distributed.utils import activation_checkpoint, model_utils
from neuronx_distributed.utils.batch_utils import get_batch_on_this_context_parallel_rank, shift_labels
from neuronx_distributed.utils.utils import hardware
from nxd_pipeline import NxDPPModel
from nxd_state import destroy_model_parallel, initialize_model_parallel
from torch import nn
from torch.nn import functional as F


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


@pytest.fixture
def one_rank():
    initialize_model_parallel()
    yield
    destroy_model_parallel()


# Attention and positions.


@pytest.mark.parametrize("sequence_last", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_flash_attention_equals_the_product_that_it_stands_for(causal, sequence_last):
    q, k, v = (torch.randn(2, heads, 8, 4, dtype=torch.float64) for heads in (4, 2, 2))
    keys, values = (it.repeat_interleave(2, dim=1) for it in (k, v))
    expected = F.scaled_dot_product_attention(q, keys, values, is_causal=causal)
    inputs = [it.transpose(2, 3) for it in (q, k, v)] if sequence_last else [q, k, v]

    found = nki_flash_attn_func(*inputs, causal=causal, transpose_nki_inputs=sequence_last)

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_ring_attention_of_one_rank_is_attention():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 6, 8) for heads in (4, 2, 2))

    got = nki_ring_attn_func(q, k, v, 0, [])

    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


def attend_over_two_ranks():
    """Context parallelism by hand, as upstream's scripts do it."""
    initialize_model_parallel(context_parallel_size=2)
    batch = {name: torch.arange(16.0).view(1, 16).sin() for name in ("input_ids", "labels")}
    part = get_batch_on_this_context_parallel_rank(batch)
    x = part["input_ids"].view(1, 1, 8, 1)
    return part["labels"], nki_ring_attn_func(x, x, x)


def test_batch_cut_over_ranks_and_ring_attention_equal_one_process(run_ranks):
    (first_labels, first), (second_labels, second) = run_ranks(attend_over_two_ranks, 2)
    whole = torch.arange(16.0).sin()

    x = whole.view(1, 1, 16, 1)
    expected = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    torch.testing.assert_close(torch.cat([first, second], dim=2), expected)
    assert torch.equal(torch.cat([first_labels, second_labels], dim=1)[0, :-1], whole[1:])
    assert second_labels[0, -1] == -100


@pytest.mark.parametrize("sequence_last", [True, False])
def test_rotary_positions_turn_each_pair_by_its_angle(sequence_last):
    angles = torch.rand(8, 4).repeat(1, 2)
    q = torch.randn(2, 3, 8, 8)
    pairs = torch.complex(q[..., :4], q[..., 4:]) * torch.polar(torch.ones(8, 4), angles[:, :4])
    expected = torch.cat([pairs.real, pairs.imag], dim=-1)
    ids = torch.arange(8).expand(2, 8)
    given = q.transpose(2, 3) if sequence_last else q

    found, _ = apply_rotary_pos_emb(given, given, angles.cos(), angles.sin(), ids, True, sequence_last)

    torch.testing.assert_close(found.transpose(2, 3) if sequence_last else found, expected)


# Searches over ranks.


@pytest.mark.parametrize("gather_dim", [0, 1])
def test_argmax_and_topk_of_two_ranks_equal_those_of_one_process(run_ranks, gather_dim):
    torch.manual_seed(0)
    whole = torch.randn(6, 10)

    def search():
        initialize_model_parallel(tensor_model_parallel_size=2)
        own = whole.chunk(2, dim=gather_dim)[torch.distributed.get_rank()]
        best = argmax(own, dim=1, gather_dim=gather_dim, keepdim=True)
        values, places = topk(own, 7 if gather_dim == 1 else 3, dim=1, gather_dim=gather_dim)
        return best, values, places

    for best, values, places in run_ranks(search, 2):
        assert torch.equal(best, whole.argmax(dim=1, keepdim=True))
        assert torch.equal(values, whole.topk(values.shape[1], dim=1).values)
        assert torch.equal(whole.gather(1, places), values)


# Models before training.


@pytest.mark.parametrize("wrapper", [None, activation_checkpoint.NxDCheckpointWrapper])
def test_activation_checkpointing_by_a_predicate_leaves_names_and_gradients_alone(wrapper):
    torch.manual_seed(0)
    model, ids = Tied(), torch.tensor([[1, 2, 3]])
    model(ids).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    chosen = {} if wrapper is None else {"checkpoint_wrapper_fn": wrapper}

    activation_checkpoint.apply_activation_checkpointing(
        model, check_fn=lambda module: isinstance(module, nn.Sequential), **chosen
    )
    model(ids).sum().backward()

    found = {name.replace("_checkpoint_wrapped_module.", ""): it.grad for name, it in model.named_parameters()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_predicate_that_accepts_nothing_is_an_error():
    with pytest.raises(ValueError, match="accepts no module"):
        activation_checkpoint.apply_activation_checkpointing(Tied(), check_fn=lambda module: False)


# Batches and values.


def test_shifted_labels_are_the_next_tokens():
    batch = {"input_ids": torch.arange(4)[None], "labels": torch.arange(4)[None]}

    assert shift_labels(batch)["labels"].tolist() == [[1, 2, 3, -100]]
    assert batch["labels"].tolist() == [[0, 1, 2, 3]]


def test_instance_types_name_their_hardware(monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")

    assert hardware("inf2") is hardware.TRN1
    assert model_utils.get_platform_lnc() is model_utils.LogicalNCConfig.LNC_2
    with pytest.raises(ValueError, match="abacus"):
        hardware("abacus")


# Stages.


def test_layers_of_a_stage_share_weights_by_group():
    layers = [nn.Linear(2, 2) for _ in range(5)]
    stage = manual_pipe_stage.PipelineStageModule
    stage.mark_weight_sharing([(layers[0], "weight"), (layers[4], "weight")], "ends")

    first, last = stage(layers, 2, 0), stage(layers, 2, 1)

    assert layers[4].weight is layers[0].weight
    assert [first.stage_modules, last.stage_modules] == [layers[:2], layers[2:]]
    assert first.shared_weights_on_pp_stages == {"ends": [[0, 1], [layers[0], "weight"]]}
    assert torch.equal(last(first(torch.ones(1, 2))), nn.Sequential(*layers)(torch.ones(1, 2)))
    with pytest.raises(ValueError, match="5 layers cannot fill 6 stages"):
        stage(layers, 6, 0)


def test_marked_weights_stay_equal_over_stages(run_ranks):
    def train(num_stages):
        initialize_model_parallel(pipeline_model_parallel_size=num_stages)
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4).double() for _ in range(4)]
        manual_pipe_stage.PipelineStageModule.mark_weight_sharing([(layers[0], "weight"), (layers[3], "weight")])
        pipeline = NxDPPModel(layers, num_microbatches=2, manual_pp_partition=True, manual_pp_loss_fn=nn.MSELoss())
        optimizer = torch.optim.SGD(pipeline.local_parameters(), lr=0.5)
        batch = {"inputs": torch.ones(4, 4).double(), "labels": torch.zeros(4, 4).double()}
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(pipeline.run_train(**batch))
            optimizer.step()
        return losses

    torch.testing.assert_close(run_ranks(train, 2, 2)[1], run_ranks(train, 1, 1)[0], rtol=1e-10, atol=1e-12)


def test_cuts_leave_the_remainder_to_later_stages():
    assert partition.create_partitions(3, ["a", "b", "c", "d", "e"]) == ["a", "c"]
    assert partition.stage_to_pipeline_parallel_rank(5, pp_size=4) == 1


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def scale(self, hidden):
        return hidden * int(hidden.shape[0])  # a trace cannot make a number of a proxy

    def forward(self, hidden):
        for layer in self.layers:
            hidden = self.scale(layer(hidden))
        return hidden.sum()


def test_a_method_kept_whole_is_one_node_of_the_trace():
    model = Scaled()

    traced = trace.trace_model(model, input_names=["hidden"], autowrap_obj_methods={model: ["scale"]})

    assert torch.equal(traced(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert "scale" not in vars(model)
    with pytest.raises(ValueError, match="cannot be traced"):
        trace.trace_model(model, input_names=["hidden"])
    with pytest.raises(ValueError, match="has no method shrink"):
        trace.trace_model(model, input_names=["hidden"], autowrap_obj_methods={model: ["shrink"]})


def test_pipeline_keys_of_the_old_runtime_are_taken_and_named_once(one_rank, caplog):
    caplog.set_level("INFO", "nxd_pipeline")
    keys = {"use_model_wrapper": True, "fuse_microbatches": True, "_fused_send_recv": True, "_debug_pp_size": 8}

    model = NxDPPModel(Scaled(), autowrap_obj_methods=None, **keys)
    config = nxd.neuronx_distributed_config(pipeline_config={"num_microbatches": 1, **keys})

    assert model.run_eval(hidden=torch.ones(2, 4)) is not None
    assert [record.getMessage() for record in caplog.records] == [
        "_fused_send_recv tuned the old runtime and have no effect here; remove them"
    ]
    assert config["pipeline_config"]["_fused_send_recv"] is True
    with pytest.raises(TypeError, match="no argument '_no_such_flag'"):
        NxDPPModel(Scaled(), _no_such_flag=True)


# Adapters.


def test_model_with_adapters_counts_what_trains_and_merges():
    plain = nn.Sequential(nn.Linear(3, 2), nn.Conv2d(2, 2, 1))
    model = get_lora_model(plain, LoraConfig(target_modules=["1"], lora_rank=2))

    assert model.get_base_model() is plain
    assert model.get_nb_trainable_parameters() == (2 * 2 + 2 * 2, 8 + 6 + 8)
    model.merge_lora()
    assert model.is_merged
    model.unmerge_lora()
    assert not model.is_merged


def test_lora_adapts_the_layers_that_a_config_selects():
    layer = nn.Linear(4, 4)

    adapted = get_lora_model(Tied(), LoraConfig(target_modules=["head"], lora_rank=2))

    assert isinstance(adapted, LoraModel)
    assert [name for name, it in adapted.named_parameters() if it.requires_grad] == [
        "module.head.lora_A",
        "module.head.lora_B",
    ]
    assert get_lora_model(layer, None) is layer
