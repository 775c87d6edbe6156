"""Drawing tokens from logits, and the bookkeeping of Medusa's trees of candidates.

Medusa (Cai et al. 2024) guesses several tokens ahead with further heads, checks a whole tree of guesses in one pass,
and accepts the longest branch that the model agrees with.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

TOPK = 10  # guesses of each Medusa head


class Sampler:
    """Draws one token per sequence, among the `top_k` likeliest.

    Args:
        neuron_config: its `hf_config` says `do_sample`, `num_beams` and `top_k`; `is_medusa`, if it has it, asks for
            the candidates instead of a token.

    Raises:
        ValueError: anything but sampling with one beam is requested.
    """

    def __init__(self, neuron_config: Any) -> None:
        generation = neuron_config.hf_config
        self.is_medusa = bool(getattr(neuron_config, "is_medusa", False))
        if not generation.do_sample or generation.num_beams != 1:
            raise ValueError(
                f"do_sample={generation.do_sample}, num_beams={generation.num_beams}: the sampler draws with "
                "do_sample=True and num_beams=1; top_k=1 is greedy"
            )
        self.top_k = int(generation.top_k)

    def sample(self, token_logits: Tensor) -> Tensor:
        """Token ids.

        Args:
            token_logits: `[batch, vocab]`.

        Returns:
            `[batch]` int64; for Medusa, where `top_k` is above 1, the candidates `[batch, top_k]`.
        """
        if self.top_k == 1:
            return token_logits.argmax(dim=1)
        values, ids = token_logits.topk(self.top_k, dim=1)
        if self.is_medusa:
            return ids
        # By the inverse of the distribution function: torch.multinomial would inspect values while it is traced.
        reached = F.softmax(values, dim=1).cumsum(dim=1)
        drawn = torch.rand((reached.shape[0], 1), device=reached.device)
        place = (reached < drawn).sum(dim=1, keepdim=True).clamp(max=self.top_k - 1)
        return ids.gather(1, place).flatten()


def pad_path(path: Sequence[int], length: int, pad_value: int = -2) -> list[int]:
    """The path with `pad_value` appended up to a length; longer ones stay as they are."""
    return [*path, *[pad_value] * (length - len(path))]


def generate_medusa_buffers(medusa_choices: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """What is fixed for a tree of candidates.

    Args:
        medusa_choices: the nodes below the root, each as its path: the rank of the guess at every depth. With a node
            its ancestors must be there.

    Returns:
        By name, for `n` nodes and the root: `medusa_attn_mask` `[1+n, 1+n]` float32, 1 where a node may look (itself,
        ancestors, root); `tree_indices` `[1+n]` int64, a node's place in the flat list of guesses;
        `medusa_position_ids` `[1+n]` int64, depths; `retrieve_indices` `[leaves, 1+depth]` int64, the nodes of the
        branch that ends at each leaf, -1 behind shorter ones.

    Raises:
        ValueError: a path without its ancestors, or no path at all.
    """
    paths = sorted((tuple(path) for path in medusa_choices), key=lambda path: (len(path), path))
    number = {path: index + 1 for index, path in enumerate(paths)}
    orphans = [path for path in paths if not path or (len(path) > 1 and path[:-1] not in number)]
    if not paths or orphans:
        raise ValueError(f"medusa_choices has {orphans or 'no path'}; include all ancestors of every node")
    mask = torch.eye(len(paths) + 1)
    mask[:, 0] = 1
    for path, index in number.items():
        mask[index, [number[path[:depth]] for depth in range(1, len(path))]] = 1
    depth = len(paths[-1])
    inner = {path[:-1] for path in paths}
    branches = [
        pad_path([0, *(number[path[:length]] for length in range(1, len(path) + 1))], depth + 1, pad_value=-1)
        for path in reversed(paths)
        if path not in inner
    ]
    return {
        "medusa_attn_mask": mask,
        "tree_indices": torch.tensor([0, *(path[-1] + TOPK * (len(path) - 1) + 1 for path in paths)]),
        "medusa_position_ids": torch.tensor([0, *map(len, paths)]),
        "retrieve_indices": torch.tensor(branches),
    }


def generate_candidates(
    medusa_logits: Tensor, logits: Tensor, tree_indices: Tensor, retrieve_indices: Tensor
) -> tuple[Tensor, Tensor]:
    """The guesses of a step, along the branches and along the tree.

    Args:
        medusa_logits: token ids that each head guesses, `[heads, 1, 1, TOPK]`.
        logits: token ids of the model itself, likeliest first, `[1, 1, k]`.
        tree_indices: result of `generate_medusa_buffers`.
        retrieve_indices: as above.

    Returns:
        `[leaves, 1+depth]`, with 0 behind shorter branches, and `[1, 1+n]`.
    """
    flat = torch.cat([logits.flatten()[:1], medusa_logits.reshape(-1)])
    tree = flat[tree_indices]
    branches = torch.cat([tree, tree.new_zeros(1)])[retrieve_indices]
    return branches, tree.unsqueeze(0)


def evaluate_posterior(logits: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """The branch whose guesses agree longest with the model.

    Args:
        logits: token ids that the model puts first after each token of a branch, `[leaves, 1+depth, k]`.
        candidates: `[leaves, 1+depth]`.

    Returns:
        Its number and how many of its guesses are right, both 0-d int64; the first of equally good ones.
    """
    agrees = (candidates[:, 1:] == logits[:, :-1, 0]).long()
    lengths = agrees.cumprod(dim=1).sum(dim=1)
    return lengths.argmax(), lengths.max()


def update_inference_inputs(
    input_ids: Tensor,
    candidates: Tensor,
    best_candidate: Tensor,
    accept_length: Tensor,
    retrieve_indices: Tensor,
    outputs: Mapping[str, Any],
    logits: Tensor,
    medusa_logits: Tensor,
    new_token: int | Tensor,
) -> tuple[Tensor, Tensor, Tensor, int | Tensor, Tensor]:
    """Take over the accepted branch.

    Args:
        input_ids: `[1, seq]`.
        candidates: result of `generate_candidates`.
        best_candidate: result of `evaluate_posterior`.
        accept_length: as above.
        retrieve_indices: result of `generate_medusa_buffers`.
        outputs: the model's; not used.
        logits: `[leaves, 1+depth, ...]`.
        medusa_logits: `[heads, leaves, 1+depth, ...]`.
        new_token: tokens made so far.

    Returns:
        `input_ids` `[1, seq+accepted+1]`; `logits` and `medusa_logits` at the last accepted token; `new_token`; and
        the places of the accepted tokens in the cache.
    """
    accepted = int(accept_length) + 1
    places = retrieve_indices[best_candidate, :accepted] + input_ids.shape[1]
    input_ids = torch.cat([input_ids, candidates[best_candidate, :accepted].unsqueeze(0)], dim=-1)
    last = slice(accepted - 1, accepted)
    return (
        input_ids,
        logits[None, best_candidate, last],
        medusa_logits[:, None, best_candidate, last],
        (new_token + accepted),
        places,
    )
