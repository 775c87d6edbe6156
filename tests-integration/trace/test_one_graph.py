"""Every tensor-parallel rank records the same graphs of a Llama, forward and backward: the rank comes in as data."""

import pytest
import torch
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_state import initialize_model_parallel
from torch._dynamo.backends.common import aot_autograd

pytestmark = pytest.mark.sample(1)  # each takes its time

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def make_model(sequence_parallel: bool) -> tuple[LlamaForCausalLM, torch.Tensor]:
    """A model on this rank, and tokens."""
    initialize_model_parallel(tensor_model_parallel_size=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG, sequence_parallel=sequence_parallel, dtype=torch.float64)
    return model, torch.randint(CONFIG.vocab_size, (2, 8))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_exported_llama_with_its_loss_is_the_same_graph_on_every_rank(run_ranks, sequence_parallel):
    def export():
        model, tokens = make_model(sequence_parallel)
        with torch.no_grad():
            exported = torch.export.export(model, (tokens, tokens), strict=False)
            torch.testing.assert_close(exported.module()(tokens, tokens), model(tokens, tokens))
        return str(exported.graph)

    first, second = run_ranks(export, 2)
    assert first == second


@pytest.mark.sample(1)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_compiled_training_step_of_a_llama_is_the_same_graph_on_every_rank(run_ranks, sequence_parallel):
    def train():
        model, tokens = make_model(sequence_parallel)
        graphs = []

        def note(graph, example_inputs):
            graphs.append(str(graph.graph))
            return graph

        backend = aot_autograd(fw_compiler=note, bw_compiler=note)
        torch.compile(model, fullgraph=True, backend=backend)(tokens, tokens).backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        model(tokens, tokens).backward()
        torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])
        return graphs

    first, second = run_ranks(train, 2)
    assert len(first) == 2
    assert first == second
