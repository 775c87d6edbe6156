"""Our Llama and transformers' with the same weights: equal logits, loss and gradients at every degree, in float64."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from nxd_engine.checkpoints.model_description import own_llama_config
from nxd_engine.checkpoints.state import logical_name
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_state import active_group, all_gather, get_shard_spec, initialize_model_parallel
from nxd_testing import LogicalPiece, assemble_logical, logical_pieces
from nxd_trainer.generate import generate
from torch import nn
from torch.nn import functional as F

transformers = pytest.importorskip(
    "transformers", reason="comparing with transformers needs it: pip install transformers"
)

RTOL = 1e-10
HEADS = {"MHA": (8, 8), "GQA": (8, 4), "GQA with fewer heads than ranks": (8, 2), "heads that do not divide": (12, 3)}
TOKENS = torch.arange(3 * 17).view(3, 17) * 7 % 24


def sizes(heads: str, tied: bool) -> dict[str, object]:
    num_heads, num_key_value_heads = HEADS[heads]
    return {
        "vocab_size": 24,
        "hidden_size": 4 * num_heads,
        "intermediate_size": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_key_value_heads,
        "max_position_embeddings": 32,
        "rope_theta": 100.0,
        "initializer_range": 0.3,
        "tie_word_embeddings": tied,
    }


@functools.cache
def theirs(heads: str, tied: bool) -> SimpleNamespace:
    """Weights, logits, loss and gradients of transformers' model, by name."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes(heads, tied), attn_implementation="sdpa")
    model = transformers.LlamaForCausalLM(config).double()
    compute_norms_in_float64(model)
    logits = model(TOKENS[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())  # transformers' own is in float32
    loss.backward()
    named = dict(model.named_parameters())
    return SimpleNamespace(
        weights={name: parameter.detach() for name, parameter in named.items()},
        logits=logits.detach(),
        loss=loss.detach(),
        gradients={name: parameter.grad for name, parameter in named.items()},
    )


def compute_norms_in_float64(model: nn.Module) -> None:
    """transformers computes them in float32 whatever the model's dtype; torch's own are the same formula."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=torch.float64)
                nn.init.uniform_(norm.weight, 0.5, 1.5)
                setattr(module, name, norm)


def gradients_by_logical_name(model: nn.Module) -> list[LogicalPiece]:
    """This rank's parts of them."""
    pieces = logical_pieces((name, parameter, parameter.grad) for name, parameter in model.named_parameters())
    return [replace(piece, name=logical_name(*piece.name.partition(":")[::2])) for piece in pieces]


@torch.no_grad()
def load(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Give this rank its parts of whole weights."""
    for name, parameter in model.named_parameters():
        spec = get_shard_spec(parameter)
        if spec is None:
            parameter.copy_(weights[name])
            continue
        logical = {relative: weights[logical_name(name, relative)] for relative in spec.logical_shapes}
        spec.copy_from_logical(logical, parameter)


def ours(tp: int, model_sizes: dict[str, object], weights: dict[str, torch.Tensor], sequence_parallel: bool):
    """What a rank has of ours, in the same terms."""
    initialize_model_parallel(tensor_model_parallel_size=tp)
    model = LlamaForCausalLM(LlamaConfig(**model_sizes), sequence_parallel=sequence_parallel, dtype=torch.float64)
    load(model, weights)
    loss = model(TOKENS[:, :-1], TOKENS[:, 1:])
    loss.backward()
    group = active_group("tp")
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel_enabled", False) and get_shard_spec(parameter) is None:
            parameter.grad = all_gather(parameter.grad.unsqueeze(0), group).sum(dim=0)
    logits = all_gather(model(TOKENS[:, :-1]).detach(), group, dim=-1)
    return SimpleNamespace(logits=logits, loss=loss.detach(), gradients=gradients_by_logical_name(model))


@pytest.mark.pairs
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_llama_equals_that_of_transformers(run_ranks, tp, sequence_parallel, heads, tied):
    expected = theirs(heads, tied)

    by_rank = run_ranks(ours, tp, tp, sizes(heads, tied), expected.weights, sequence_parallel)

    for rank in by_rank:
        torch.testing.assert_close(rank.logits, expected.logits, rtol=RTOL, atol=RTOL)
        torch.testing.assert_close(rank.loss, expected.loss, rtol=RTOL, atol=0)
    gradients = assemble_logical([rank.gradients for rank in by_rank])
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(
            gradients[name], gradient, rtol=RTOL, atol=RTOL * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


ROPE_TYPES = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "longrope": {
        "short_factor": [1.0, 1.5],
        "long_factor": [2.0, 4.0],
        "original_max_position_embeddings": 8,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_scaled_rotary_embeddings_are_those_of_transformers(rope_type, dtype):
    """Short and long sequences, beyond the positions that the model is made for, too; then from a cache."""
    given = sizes("GQA", tied=False) | {"max_position_embeddings": 12}
    scaling = {"rope_type": rope_type, **ROPE_TYPES[rope_type]}
    torch.manual_seed(0)
    rope = {"rope_theta": given["rope_theta"], **scaling}
    given_to_theirs = {name: value for name, value in given.items() if name != "rope_theta"} | {"rope_parameters": rope}
    their_config = transformers.LlamaConfig(**given_to_theirs, eos_token_id=None)
    their_model = transformers.LlamaForCausalLM(their_config).to(dtype).eval()
    config = own_llama_config(their_model.config.to_dict())
    our_model = LlamaForCausalLM(config, dtype=dtype)
    if dtype == torch.float64:
        compute_norms_in_float64(their_model)
    load(our_model, dict(their_model.named_parameters()))
    tolerance = RTOL if dtype == torch.float64 else 1e-5

    with torch.no_grad():
        for length in (5, 9, 17, 6):
            expected = their_model(TOKENS[:, :length], use_cache=False).logits
            torch.testing.assert_close(our_model(TOKENS[:, :length]), expected, rtol=tolerance, atol=tolerance)
        plain = LlamaForCausalLM(replace(config, rope_scaling=None), dtype=dtype)
        load(plain, dict(their_model.named_parameters()))
        assert not torch.allclose(plain(TOKENS), our_model(TOKENS), atol=1e-3)
        prompt = TOKENS[:1, :6]
        written = their_model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False, pad_token_id=0
        )
        assert list(generate(our_model, prompt[0], max_new_tokens=5, temperature=0)) == written[0, 6:].tolist()


def test_unusable_rotary_settings_are_refused_when_the_model_is_made():
    config = LlamaConfig(**sizes("GQA", tied=False), rope_scaling={"rope_type": "llama3", "factor": "x"})

    with pytest.raises(ValueError, match=r"rope_scaling=\{'rope_type': 'llama3', 'factor': 'x'\} is not usable: "):
        LlamaForCausalLM(config)
