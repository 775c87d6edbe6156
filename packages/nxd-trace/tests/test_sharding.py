"""Existing models: planned ranks, each rank's weights, and state found by a call."""

from functools import partial

import pytest
import torch
from module_on_ranks import INPUTS, OUTPUTS, Accumulating, Assigning
from nxd_state import (
    initialize_model_parallel,
    model_parallel_is_initialized,
    planned_world,
    set_shard_spec,
    shard_along,
)
from nxd_trace import Program, WorkerError, rank_weights, trace_module, whole_weights
from safetensors.torch import load_file
from torch import nn

WEIGHTS = {
    "weight": torch.arange(12, dtype=torch.float64).view(OUTPUTS, INPUTS),
    "bias": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
}


def model_of(tp, make=Accumulating):
    with planned_world(tp):
        initialize_model_parallel(tensor_model_parallel_size=tp)
        return make()


def traced(tp, make=Accumulating):
    programs = [Program(str(batch), torch.ones(batch, INPUTS, dtype=torch.float64)) for batch in (1, 2)]
    return trace_module(model_of(tp, make), programs, tp, compiler="export", progress=False)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_of_one_rank_is_traced_for_all_of_them(tp):
    with traced(tp) as model:
        shards = rank_weights(WEIGHTS, model_of(tp), range(tp))
        model.replace_weights(whole_weights(shards, model))
        x = torch.randn(2, INPUTS, dtype=torch.float64)
        expected = x @ WEIGHTS["weight"].t() + WEIGHTS["bias"]

        first, second = model(x), model(x[:1])
        with pytest.raises(ValueError, match=f"rank={tp} is outside the model's {tp} ranks"):
            model.read_weights(tp)

        total = expected.sum(0)
        torch.testing.assert_close(first, expected + total)
        torch.testing.assert_close(second, expected[:1] + total + expected[0])
        torch.testing.assert_close(model.read_state("total", rank=tp - 1), total + expected[0])
        torch.testing.assert_close(model.read_weights(tp - 1), shards[tp - 1])


def test_a_buffer_that_forward_assigns_is_state():
    with traced(2, Assigning) as model:
        model.replace_weights(WEIGHTS)
        x = torch.randn(1, INPUTS, dtype=torch.float64)
        expected = x @ WEIGHTS["weight"].t() + WEIGHTS["bias"]

        model(x)

        torch.testing.assert_close(model.read_state("total", rank=1), 2 * expected[0])  # it has seen the group's size
        torch.testing.assert_close(model(x), expected + 3 * expected[0])


def test_a_model_of_a_class_that_workers_cannot_import_is_traced():
    class Doubling(Accumulating):
        def forward(self, x):
            return 2 * super().forward(x)

    with traced(2, Doubling) as model:
        model.replace_weights(WEIGHTS)
        x = torch.randn(1, INPUTS, dtype=torch.float64)

        torch.testing.assert_close(model(x), 4 * (x @ WEIGHTS["weight"].t() + WEIGHTS["bias"]))


def test_a_buffer_of_another_dtype_than_before_is_refused():
    with pytest.raises(WorkerError, match=r"replaces total, torch\.float64 \[3\], by .*float32 \[3\]; state must be"):
        traced(1, partial(Assigning, torch.float32))


def test_each_ranks_weights_are_its_parts_and_are_written(tmp_path):
    shards = rank_weights(WEIGHTS, model_of(2), range(2), folder=tmp_path)

    assert [shard["weight"].tolist() for shard in shards] == [it.tolist() for it in WEIGHTS["weight"].chunk(2, dim=1)]
    assert all(torch.equal(shard["bias"], WEIGHTS["bias"]) for shard in shards)
    assert torch.equal(load_file(tmp_path / "tp1_sharded_checkpoint.safetensors")["weight"], shards[1]["weight"])


def test_weights_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="the checkpoint lacks bias"):
        rank_weights({"weight": WEIGHTS["weight"]}, model_of(2), range(2))
    with pytest.raises(ValueError, match=r"weight has shape \[2, 2\] in the checkpoint but \[3, 4\] in the model"):
        rank_weights({**WEIGHTS, "weight": torch.ones(2, 2)}, model_of(2), range(2))


def test_a_fused_parameter_asks_for_a_function():
    model = nn.Module()
    model.fused = nn.Parameter(torch.zeros(2, 2))
    set_shard_spec(model.fused, shard_along((4, 2), 0, rank=0, size=2, name="q_proj.weight"))

    with pytest.raises(
        ValueError, match=r"fused is fused or replicated.*a function that builds the model on each rank"
    ):
        rank_weights({"fused": torch.zeros(4, 2)}, model, [1])


def test_a_planned_world_ends_with_its_block_and_is_not_made_inside_another():
    with planned_world(6, rank=5):
        initialize_model_parallel(tensor_model_parallel_size=3)
        with pytest.raises(RuntimeError, match="already initialized"), planned_world(2):
            pass

    assert not model_parallel_is_initialized()
    with pytest.raises(ValueError, match=r"rank=2 is outside 0\.\.1"), planned_world(2, rank=2):
        pass
