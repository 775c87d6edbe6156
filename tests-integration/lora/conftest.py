"""A tiny Llama as transformers has it, and ours with the same weights at any layout."""

import nxd_state
import pytest
import torch
from nxd_engine.checkpoints.state import logical_name
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_testing import run_on_ranks

SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
TOKENS = torch.arange(16).view(2, 8) % 11


@pytest.fixture
def on_tp():
    """`on_tp(tp, fn, *args)`: what `fn(*args)` returns on each rank of a mesh of `tp` tensor-parallel ranks."""

    def run(tp, fn, *args):
        def job():
            nxd_state.initialize_model_parallel(tensor_model_parallel_size=tp)
            return fn(*args)

        return run_on_ranks(job, tp)

    return run


@pytest.fixture
def hugging_face_llama():
    """`hugging_face_llama(**settings)`: the same weights at each call, float64."""
    transformers = pytest.importorskip("transformers")

    def make(**settings):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **settings)).double().eval()

    return make


@pytest.fixture
def our_llama():
    """`our_llama(weights, sequence_parallel=False)`: ours, on this rank, with whole weights given by name."""

    def make(weights, sequence_parallel=False):
        model = LlamaForCausalLM(LlamaConfig(**SIZES), sequence_parallel=sequence_parallel, dtype=torch.float64)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                spec = nxd_state.get_shard_spec(parameter)
                if spec is None:
                    parameter.copy_(weights[name])
                    continue
                logical = {relative: weights[logical_name(name, relative)] for relative in spec.logical_shapes}
                spec.copy_from_logical(logical, parameter)
        return model.eval()

    return make


@pytest.fixture
def whole_logits():
    """`whole_logits(model)`: for a few fixed tokens, `[batch, seq, vocab]`."""

    def compute(model):
        with torch.no_grad():
            logits = model(TOKENS)
        if hasattr(logits, "logits"):
            return logits.logits
        return nxd_state.all_gather(logits.contiguous(), nxd_state.active_group("tp"), dim=2)

    return compute
