"""`initialize_parallel_model`: what the config makes of a model."""

import os

import pytest
import torch
from nxd_engine import initialize_parallel_model, neuronx_distributed_config
from nxd_engine.models import LlamaDecoderLayer, LlamaForCausalLM
from nxd_layers import ColumnParallelLinear, CoreAttention, RowParallelLinear
from nxd_lora import LoraConfig
from nxd_state import PeerError, get_group
from torch import nn

STAGES = {
    "transformer_layer_cls": LlamaDecoderLayer,
    "auto_partition": True,
    "input_names": ["input_ids", "labels"],
}

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("one_process")]


def checkpointed(model: nn.Module) -> list[str]:
    """Names of the modules whose forward was replaced."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def run_once(config, llama_config) -> None:
    model = initialize_parallel_model(config, LlamaForCausalLM, llama_config)
    tokens = torch.ones(1, 4, dtype=torch.long)
    model.run_train(tokens, tokens)


class Norm(nn.Module):
    """Scaled by a parameter, and shifted by a buffer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.register_buffer("shift", torch.full((size,), 0.5))

    def forward(self, x):
        return x * self.weight + self.shift


class Tied(nn.Module):
    """A table that is the head as well, as a language model has it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.norm = Norm(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.norm(self.table(ids)))


def fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.fill_(2.0)


def fill_all(module: nn.Module) -> None:
    fill(module)
    for buffer in module.buffers(recurse=False):
        buffer.fill_(3.0)


@pytest.mark.parametrize(("include_buffers", "init", "shift"), [(False, fill, 0.5), (True, fill_all, 3.0)])
def test_meta_init_fills_parameters_once_and_keeps_ties_and_buffers(include_buffers, init, shift):
    config = neuronx_distributed_config(model_init_config={"meta_device_init": True, "param_init_fn": init})
    on_meta = []

    def model_fn() -> Tied:
        model = Tied()
        on_meta.extend(parameter.is_meta for parameter in model.parameters())
        return model

    model = initialize_parallel_model(config, model_fn, include_buffers=include_buffers).local_module()

    assert on_meta == [True, True]  # the table, which is the head, and the norm
    assert not Tied().table.weight.is_meta
    assert model.head.weight is model.table.weight
    assert model.table.weight.unique().tolist() == [2.0]
    assert model.norm.shift.unique().tolist() == [shift]


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, []),
        ("full", ["model.layers.0", "model.layers.1"]),
        (CoreAttention, ["model.layers.0.self_attn.core", "model.layers.1.self_attn.core"]),
        ("LlamaMLP", ["model.layers.0.mlp", "model.layers.1.mlp"]),
    ],
)
def test_chosen_modules_are_recomputed(llama_config, chosen, names):
    config = neuronx_distributed_config(activation_checkpoint_config=chosen)

    model = initialize_parallel_model(config, LlamaForCausalLM, llama_config)

    assert checkpointed(model) == names


def test_full_means_the_given_transformer_layers_where_they_are_given(llama_config):
    config = neuronx_distributed_config(
        activation_checkpoint_config="full", pipeline_config={"transformer_layer_cls": CoreAttention}
    )

    model = initialize_parallel_model(config, LlamaForCausalLM, llama_config)

    assert checkpointed(model) == ["model.layers.0.self_attn.core", "model.layers.1.self_attn.core"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return x + self.norm(self.linear(x)).relu()


class Blocks(nn.Module):
    """A stack that only its structure tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("lora", [None, LoraConfig(target_modules=["linear"], lora_rank=2)], ids=["all", "adapters"])
def test_full_recomputes_the_blocks_of_each_stage_that_structure_tells_of(run_ranks, lora):
    x = torch.linspace(-1, 1, 8).view(2, 4)

    def run(pipeline_parallel_size):
        config = neuronx_distributed_config(
            pipeline_parallel_size=pipeline_parallel_size,
            pipeline_config={"pipeline_cuts": ["blocks.0"], "broadcast_and_average_loss": True, "input_names": ["x"]}
            if pipeline_parallel_size > 1
            else None,
            activation_checkpoint_config="full" if pipeline_parallel_size > 1 else None,
            lora_config=lora,
        )
        torch.manual_seed(0)
        model = initialize_parallel_model(config, Blocks)
        loss = model.run_train(x)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return checkpointed(model), loss, gradients

    (first, loss, gradients), (last, loss_there, more_gradients) = run_ranks(run, 2, 2)

    _, expected, expected_gradients = run(1)
    assert (first, last) == (["blocks.0"], ["blocks.1", "blocks.2", "blocks.3"])
    torch.testing.assert_close((loss, loss_there), (expected, expected), check_dtype=False)
    torch.testing.assert_close(gradients | more_gradients, expected_gradients)


def test_adapters_alone_train_and_base_names_stay(llama_config):
    lora = LoraConfig(target_modules=["q_proj"], lora_rank=2)

    model = initialize_parallel_model(neuronx_distributed_config(lora_config=lora), LlamaForCausalLM, llama_config)

    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == [f"model.layers.{i}.self_attn.q_proj.lora_{part}" for i in range(2) for part in "AB"]
    assert model.lora_model.lora_config == lora


class Attention(nn.Module):
    """Three heads of size four, which two ranks cannot share without padding."""

    class config:  # noqa: N801
        num_attention_heads = 3

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = ColumnParallelLinear(5, 12, bias=False, gather_output=False)
        self.o_proj = RowParallelLinear(12, 5, bias=False, input_is_parallel=True)

    def forward(self, x):
        return self.o_proj(torch.relu(self.q_proj(x))).square().mean()


def test_padded_heads_change_nothing_and_need_their_number(run_ranks):
    x = torch.linspace(-1, 1, 30).view(2, 3, 5)

    def run():
        config = neuronx_distributed_config(tensor_parallel_size=2, pad_model=True)
        torch.manual_seed(0)
        model = initialize_parallel_model(config, Attention)
        with pytest.raises(ValueError, match=r"ColumnParallelLinear has no config\.num_attention_heads"):
            initialize_parallel_model(config, ColumnParallelLinear, 4, 4)
        return model.run_train(x), model.local_module().q_proj.weight.shape[0]

    results = run_ranks(run, 2)

    torch.manual_seed(0)
    expected = Attention()(x).detach()
    for loss, rows in results:
        torch.testing.assert_close(loss, expected)
        assert rows == 8  # two heads of four


def test_sequence_parallel_config_of_a_model_that_is_not_is_refused_on_every_rank(run_ranks, llama_config):
    def run():
        config = neuronx_distributed_config(tensor_parallel_size=2, sequence_parallel=True)
        initialize_parallel_model(config, LlamaForCausalLM, llama_config, sequence_parallel=True)
        with pytest.raises(
            ValueError, match=r"no sequence-parallel layer.*scatter the activations after the embedding"
        ):
            initialize_parallel_model(config, LlamaForCausalLM, llama_config)

    run_ranks(run, 2)


def test_ranks_take_turns_and_hear_of_a_failure_in_another_turn(run_ranks, llama_config):
    def run():
        config = neuronx_distributed_config(model_init_config={"sequential_move_factor": 1})
        torch.manual_seed(0)
        model = initialize_parallel_model(config, LlamaForCausalLM, llama_config)
        rank = get_group("dp").rank

        def fail_on_first_rank() -> nn.Module:
            if rank == 0:
                raise KeyError("weights")
            return nn.Linear(1, 1)

        with pytest.raises((KeyError, RuntimeError)) as raised:
            initialize_parallel_model(config, fail_on_first_rank)
        return model.state_dict()["lm_head.weight"], str(raised.value)

    (first, own), (second, other) = run_ranks(run, 2)

    assert torch.equal(first, second)
    assert own == "'weights'"
    assert other == "making the model failed on rank 0: KeyError: 'weights'"


def test_every_rank_makes_its_model_also_where_the_launcher_does_not_say_how_many_a_host_has(run_ranks):
    def run():
        os.environ.pop("LOCAL_WORLD_SIZE")
        config = neuronx_distributed_config(model_init_config={"sequential_move_factor": 1})
        return type(initialize_parallel_model(config, nn.Linear, 1, 1).local_module()).__name__

    assert run_ranks(run, 2) == ["Linear", "Linear"]


def test_parameters_that_one_stage_cannot_fill_are_an_error_on_all_ranks(run_ranks, llama_config):
    def run():
        config = neuronx_distributed_config(
            pipeline_parallel_size=2,
            pipeline_config=STAGES,
            model_init_config={"meta_device_init": True, "param_init_fn": fill_on_first_stage},
        )
        with pytest.raises(Exception, match="no values") as raised:
            initialize_parallel_model(config, LlamaForCausalLM, llama_config)
        return type(raised.value), str(raised.value)

    def fill_on_first_stage(module):
        if get_group("pp").rank == 1:
            raise KeyError("no values")
        fill(module)

    assert run_ranks(run, 2) == [
        (PeerError, "making the stages of the model failed on rank 1: KeyError: 'no values'"),
        (KeyError, "'no values'"),
    ]


def test_model_fn_that_returns_no_model_and_a_config_that_was_spoilt_are_refused(llama_config):
    config = neuronx_distributed_config()

    with pytest.raises(ValueError, match="model_fn returned a dict"):
        initialize_parallel_model(config, dict)
    config["optimizer_config"]["zero_on_enabled"] = True
    with pytest.raises(ValueError, match=r"zero_on_enabled; did you mean optimizer_config\.zero_one_enabled"):
        initialize_parallel_model(config, LlamaForCausalLM, llama_config)


def test_meta_init_leaves_only_a_stages_own_parameters_on_a_rank(run_ranks, llama_config):
    def run():
        config = neuronx_distributed_config(
            pipeline_parallel_size=2,
            pipeline_config=STAGES,
            model_init_config={"meta_device_init": True, "param_init_fn": fill},
        )
        model = initialize_parallel_model(config, LlamaForCausalLM, llama_config)
        return {name: parameter.unique().tolist() for name, parameter in model.named_parameters()}

    for parameters in run_ranks(run, 2):
        assert set(map(tuple, parameters.values())) == {(2.0,)}


@pytest.mark.parametrize(("given", "init", "shift"), [(False, fill, 0.5), (True, fill_all, 3.0)])
def test_bool_that_the_maker_does_not_take_is_include_buffers(given, init, shift):
    model_init = {"meta_device_init": True, "param_init_fn": init}
    config = neuronx_distributed_config(model_init_config=model_init)

    norm = initialize_parallel_model(config, Norm, given, 4)

    assert norm.local_module().shift.tolist() == [shift] * 4


def test_bool_that_the_maker_takes_is_its_own():
    config = neuronx_distributed_config()

    model = initialize_parallel_model(config, lambda bias: nn.Linear(2, 2, bias=bias), False)

    assert model.local_module().bias is None
