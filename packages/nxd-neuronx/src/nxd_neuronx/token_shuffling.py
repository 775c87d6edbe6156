"""Tokens dealt at random to replicas, and back."""

import torch
from nxd_layers import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from nxd_layers.mappings import all_to_all_region
from nxd_state import group_of
from torch import Tensor

from nxd_neuronx.mesh import get_token_shuffle_group, get_token_shuffle_group_size


def token_shuffle(hidden_states: Tensor, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Deal tokens at random to the replicas of the token-shuffle group (Lewis et al. 2021, "BASE Layers").

    Args:
        hidden_states: `[seq, batch, hidden]`, or with the first two in reverse.
        seed: random seed of the permutation; None uses torch's default generator.

    Returns:
        The same shape, tokens of all replicas; and the permutation of this rank's, `[tokens]`, for `token_unshuffle`.

    Raises:
        ValueError: the replicas do not divide the tokens.
    """
    tokens = hidden_states.flatten(0, 1)
    size = get_token_shuffle_group_size()
    if len(tokens) % size:
        raise ValueError(f"{size} replicas do not divide {len(tokens)} tokens; use token_shuffle_group_size=1")
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    permutation = torch.randperm(len(tokens), generator=generator).to(tokens.device)
    return all_to_all_for_shuffle(tokens[permutation]).view_as(hidden_states), permutation


def token_unshuffle(permuted_states: Tensor, permutation: Tensor) -> Tensor:
    """Tokens back to their replicas and places.

    Args:
        permuted_states: hidden states of the tokens from `token_shuffle`, `[seq, batch, hidden]`.
        permutation: as it gave it.
    """
    tokens = all_to_all_for_shuffle(permuted_states.flatten(0, 1))
    return tokens[permutation.argsort()].view_as(permuted_states)


def all_to_all_for_shuffle(hidden_states: Tensor, input_is_sequence_parallel: bool = True) -> Tensor:
    """The i-th part of this replica's tokens to the i-th replica of the token-shuffle group.

    Args:
        hidden_states: `[tokens, hidden]`.
        input_is_sequence_parallel: False if all tensor-parallel ranks have the same tokens: each sends a part of them.
    """
    if get_token_shuffle_group_size() == 1:
        return hidden_states
    part = hidden_states if input_is_sequence_parallel else scatter_to_sequence_parallel_region(hidden_states)
    group = group_of(get_token_shuffle_group())  # type: ignore[arg-type]  # a list only if asked
    part = all_to_all_region(part, group, 0, 0)
    if input_is_sequence_parallel:
        return part
    return gather_from_sequence_parallel_region(part, to_model_parallel=False)
