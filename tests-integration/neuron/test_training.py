"""Runs of `nxd train` on the stand-in for the native `neuron` device equal those on the CPU, whatever the layout.

The stand-in (`nxd_testing.run_on_neuron`) refuses what the real device does not have, so a run that passes uses
no float64, no shapes that depend on data, and no tensors of the CPU in process groups. Nothing here needs torch-xla.
"""

import random
from pathlib import Path

import pytest
import torch
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_layers.experts import ExpertMLPs, MoE, RouterTopK, load_balancing_loss
from nxd_state import get_device, get_group, initialize_model_parallel, whole_parameters
from nxd_testing import LogicalPiece, assemble_logical, logical_pieces, run_on_neuron, run_torchrun
from nxd_testing.neuron_device import register_neuron_compiler
from nxd_trainer.generate import generate
from nxd_trainer.recipe import load_recipe
from nxd_trainer.training import StopRequest, prepare_run, run_training

pytestmark = [
    pytest.mark.skipif(torch.__version__ < "2.13", reason="the stand-in needs torch 2.13"),
    pytest.mark.sample(2),  # each takes its time
]
TP2, PP2 = "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"
SP, ZERO1 = "parallel.sequence_parallel=true", "parallel.zero_stage=1"
CP2 = "parallel.context_parallel_size=2"
LAYOUTS = {
    "one": (1, []),
    "tp2": (2, [TP2]),
    "tp2-sp": (2, [TP2, SP]),
    "pp2": (2, [PP2]),
    "dp2-zero1": (2, [ZERO1]),
    "tp2-dp2": (4, [TP2]),
    "tp2-sp-pp2": (4, [TP2, SP, PP2]),
    "tp2-sp-dp2-zero1-full": (4, [TP2, SP, ZERO1, "parallel.activation_checkpointing=full"]),
    "tp2-bfloat16": (2, [TP2, "train.dtype=bfloat16"]),
    "tp2-autocast": (2, [TP2, "train.autocast=bfloat16"]),
    "pp2-accumulating": (2, [PP2, "train.gradient_accumulation_steps=2"]),
    "cp2": (2, [CP2]),
    "dp2-zero1-offload": (2, [ZERO1, "parallel.zero_offload=optimizer"]),
    "tp2-sp-dp2-zero3-offload": (4, [TP2, SP, "parallel.zero_stage=3", "parallel.zero_offload=parameters"]),
    "pp2-dp2-zero3-offload": (4, [PP2, "parallel.zero_stage=3", "parallel.zero_offload=parameters"]),
    "cp2-tp2-sp-zero1": (4, [CP2, TP2, SP, ZERO1]),
}
STAND_IN = "from nxd_testing import register_neuron_ranks\n\nregister_neuron_ranks()\n"


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory) -> Path:
    """Four files of made-up words."""
    folder = tmp_path_factory.mktemp("text")
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 7))) for _ in range(50)]
    for number in range(4):
        (folder / f"{number}.txt").write_text(" ".join(generator.choices(words, k=400)))
    return folder


@pytest.fixture
def settings(text_folder, tmp_path) -> list[str]:
    """Recipe settings of a tiny model in float32, and a folder for its run."""
    return [
        f"data.path={text_folder}",
        f"output={tmp_path / 'run'}",
        "data.sequence_length=16",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=2",
        "train.global_batch_size=8",
        "train.steps=6",
        "train.log_every=1",
        "train.eval_every=3",
        "train.eval_batches=2",
        "optimizer.warmup_steps=2",
        "optimizer.lr=1e-3",
        "checkpoint.save_every=0",
    ]


def run(settings: list[str]) -> tuple[float, list[LogicalPiece], set[str]]:
    """A run on one rank: its last loss, its part of the weights, and the types of devices that hold it."""
    recipe = load_recipe(None, settings)
    degrees = recipe.parallel
    initialize_model_parallel(
        degrees.tensor_parallel_size,
        degrees.pipeline_parallel_size,
        degrees.expert_parallel_size,
        context_parallel_size=degrees.context_parallel_size,
    )
    state, resumed = prepare_run(recipe)
    with StopRequest() as stop:
        result = run_training(state, resumed, stop)
    named = list(state.model.named_parameters())
    with whole_parameters(state.model.parameters()):
        pieces = logical_pieces((name, parameter, parameter.detach().cpu()) for name, parameter in named)
    return result.loss, pieces, {parameter.device.type for _, parameter in named}


def check_equal(found, expected, *, dtype_rounds: bool = False) -> None:
    tolerance = 1e-2 if dtype_rounds else 1e-5
    assert found[0][0] == pytest.approx(expected[0][0], rel=tolerance)
    weights, others = (assemble_logical([rank[1] for rank in ranks]) for ranks in (found, expected))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=tolerance, atol=10 * tolerance, msg=name)


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.slow] * (name != "tp2")) for name in LAYOUTS])
def test_run_on_neuron_at_a_layout_equals_the_run_on_the_cpu(layout, run_ranks, settings, tmp_path):
    world, more = LAYOUTS[layout]

    on_cpu = run_ranks(run, world, [*settings, *more, f"output={tmp_path / 'cpu'}"])
    on_neuron = run_on_neuron(run, world, [*settings, *more])

    assert [devices for _, _, devices in on_neuron] == [{"neuron"}] * world
    check_equal(on_neuron, on_cpu, dtype_rounds="bfloat16" in str(more))


def experts_on_this_device(capacity_factor: float | None) -> tuple[list[torch.Tensor], str]:
    """Output, logits and gradients of a mixture-of-experts layer on two tensor-parallel ranks, on the host."""
    initialize_model_parallel(2)
    torch.manual_seed(0)
    mlps = ExpertMLPs(4, 2, 8, 6, capacity_factor=capacity_factor, normalize_top_k_affinities=True)
    layer = MoE(RouterTopK(4, 2, 8), mlps, return_router_logits=True).to(get_device())
    tokens = torch.arange(5 * 2 * 8.0).view(5, 2, 8).sin().to(get_device()).requires_grad_()
    output, logits = layer(tokens)
    (output.square().sum() + load_balancing_loss(logits, 4, 2)).backward()
    found = [output.detach(), logits.detach(), tokens.grad, *(it.grad for it in layer.parameters())]
    return [it.cpu() for it in found], output.device.type


@pytest.mark.parametrize("capacity_factor", [None, 0.75])
def test_layer_of_experts_on_neuron_computes_what_the_cpu_does(capacity_factor, run_ranks):
    on_cpu = run_ranks(experts_on_this_device, 2, capacity_factor)
    on_neuron = run_on_neuron(experts_on_this_device, 2, capacity_factor)

    for (found, device), (expected, _) in zip(on_neuron, on_cpu, strict=True):
        assert device == "neuron"
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def mixture() -> list[torch.Tensor]:
    """Output and gradients of a mixture of experts on one of two ranks, which have other tokens."""
    initialize_model_parallel(1, 1, 2)
    torch.manual_seed(0)
    layer = MoE(RouterTopK(4, 2, 8), ExpertMLPs(4, 2, 8, 6)).to(get_device())
    tokens = torch.randn(2, 3, 1, 8).to(get_device())[get_group("ep").rank].requires_grad_()
    (output,) = layer(tokens)
    output.pow(2).sum().backward()
    return [it.detach().cpu() for it in (output, tokens.grad, *(p.grad for p in layer.parameters()))]


def test_experts_split_over_ranks_compute_on_neuron_as_on_the_cpu(run_ranks):
    for found, expected in zip(run_on_neuron(mixture, 2), run_ranks(mixture, 2), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2-zero1", "dp2-zero1-offload", "pp2-dp2-zero3-offload"])
@pytest.mark.parametrize("first", ["cpu", "neuron"])
def test_run_resumed_on_the_other_device_equals_the_uninterrupted_one(first, layout, run_ranks, settings, tmp_path):
    world, more = LAYOUTS[layout]
    launch = {"cpu": run_ranks, "neuron": run_on_neuron}
    second = {"cpu": "neuron", "neuron": "cpu"}[first]
    whole = run_ranks(run, world, [*settings, *more, f"output={tmp_path / 'whole'}"])

    launch[first](run, world, [*settings, *more, "train.stop_after=3"])
    resumed = launch[second](run, world, [*settings, *more])

    assert resumed[0][2] == {second}
    check_equal(resumed, whole)


def compiled_run(settings: list[str]) -> tuple[float, list[LogicalPiece], set[str]]:
    """`run`, where the stand-in is a backend of torch.compile, too."""
    register_neuron_compiler()
    return run(settings)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2-sp", "pp2"])
def test_run_of_compiled_layers_on_neuron_equals_the_run_on_the_cpu(layout, run_ranks, settings, tmp_path):
    world, more = LAYOUTS[layout]

    on_cpu = run_ranks(run, world, [*settings, *more, f"output={tmp_path / 'cpu'}"])
    compiled = run_on_neuron(compiled_run, world, [*settings, *more, "train.compile=true"], timeout=600)

    check_equal(compiled, on_cpu)


def tokens(temperature: float) -> list[int]:
    """What a small Llama with weights of seed 0 writes."""
    initialize_model_parallel(tensor_model_parallel_size=2)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config).to(get_device())
    return list(generate(model, torch.tensor([3, 1, 4]), max_new_tokens=8, temperature=temperature, seed=1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generation_on_neuron_gives_the_tokens_of_the_cpu(temperature, run_ranks):
    expected = run_ranks(tokens, 2, temperature)

    assert run_on_neuron(tokens, 2, temperature) == expected


@pytest.mark.slow
def test_nxd_train_under_torchrun_takes_the_device_that_torch_neuronx_registers(settings, tmp_path, monkeypatch):
    # What a user's machine has: a package that registers the device when it is imported.
    (tmp_path / "torch_neuronx.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NXD_DEVICE", "neuron")

    result = run_torchrun(["-m", "nxd_cli", "train", *settings, TP2, ZERO1], 2, timeout=240)

    assert result.returncode == 0, result.stderr
    assert "TP 2 x DP 1, ZeRO-1 on neuron," in result.stderr
