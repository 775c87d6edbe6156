"""A decoder layer of Llama at TP 2 in torch.compile and torch.export: one graph, and the numbers of eager mode."""

import shutil

import pytest
import torch
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_engine.models.llama_config import rotary_tables
from nxd_layers.activation_checkpoint import apply_activation_checkpointing, matmul_outputs
from nxd_state import initialize_model_parallel

pytestmark = pytest.mark.sample(1)  # each takes its time

SEQUENCE = 8
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)
CHECKPOINTING = {"none": (False, None), "full": (True, None), "matmuls kept": (True, matmul_outputs)}


def make_layer(sequence_parallel: bool) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A decoder layer and its arguments."""
    initialize_model_parallel(tensor_model_parallel_size=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG, sequence_parallel=sequence_parallel, dtype=torch.float64)
    hidden = torch.randn(SEQUENCE // (2 if sequence_parallel else 1), 2, CONFIG.hidden_size, dtype=torch.float64)
    return model.model.layers[0], (hidden, rotary_tables(torch.arange(SEQUENCE), SEQUENCE, CONFIG, like=hidden), None)


def train(function, layer: torch.nn.Module, hidden: torch.Tensor, *rest: object) -> list[torch.Tensor]:
    """Output and gradients of one step."""
    layer.zero_grad()
    hidden = hidden.clone().requires_grad_()
    output = function(hidden, *rest)
    output.square().sum().backward()
    return [output, hidden.grad, *(parameter.grad for parameter in layer.parameters())]


def check_compiled(sequence_parallel: bool, backend: str) -> None:
    layer, arguments = make_layer(sequence_parallel)
    expected = train(layer, layer, *arguments)
    for name, (checkpointed, keep) in CHECKPOINTING.items():
        apply_activation_checkpointing(layer, type(layer) if checkpointed else None, keep=keep)
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        found = train(compiled, layer, *arguments)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_compiled_decoder_layer_without_graph_breaks_equals_the_eager_one(run_ranks, sequence_parallel):
    run_ranks(check_compiled, 2, sequence_parallel, "aot_eager", timeout=600)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_decoder_layer_compiled_to_machine_code_equals_the_eager_one(run_ranks, sequence_parallel):
    run_ranks(check_compiled, 2, sequence_parallel, "inductor", timeout=600)


@pytest.mark.sample(1)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_exported_decoder_layer_equals_the_eager_one(run_ranks, sequence_parallel, strict):
    @torch.no_grad()
    def check():
        layer, arguments = make_layer(sequence_parallel)
        exported = torch.export.export(layer, arguments, strict=strict).module()
        torch.testing.assert_close(exported(*arguments), layer(*arguments), rtol=1e-10, atol=1e-12)

    run_ranks(check, 2, timeout=600)
