"""Our Llama and transformers' with the same weights: equal logits, loss and gradients at every degree, in float64."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from nxd_state import active_group, all_gather, get_shard_spec, initialize_model_parallel
from nxd_state.testing import LogicalPiece, assemble_logical, logical_pieces
from nxd_trainer.checkpoint import logical_name
from nxd_trainer.models import LlamaConfig, LlamaForCausalLM
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
        for piece in spec.pieces if spec is not None else ():
            parameter[piece.local.slices] = weights[logical_name(name, piece.name)][piece.logical.slices]


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
