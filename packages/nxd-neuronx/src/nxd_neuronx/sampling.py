"""Argmax and top-k over ranks, sampling, and Medusa's trees of candidates.

Medusa (Cai et al. 2024) predicts several tokens ahead with extra heads, verifies a whole tree of candidates in one
forward, and accepts the longest branch that agrees with the model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from nxd_layers import parallel_argmax, parallel_topk
from nxd_state import Group, active_group, all_gather, checked_dim
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F


def argmax(
    tensor: Tensor,
    dim: int,
    gather_dim: int,
    keepdim: bool = False,
    process_group: ProcessGroup | None = None,
    disable_argmax_kernel: bool = False,
) -> Tensor:
    """Return the index of the largest value along a dim of the whole tensor; the lowest among equal values.

    Args:
        tensor: this rank's part.
        dim: the dim to search.
        gather_dim: the dim along which the tensor is split over the ranks.
        keepdim: whether to keep `dim`, with length 1.
        process_group: the tensor-parallel group, or None.
        disable_argmax_kernel: accepted without effect.

    Returns:
        int64 indices, the same on every rank: the shape of `tensor` without `dim`, whole along `gather_dim`.

    Raises:
        ValueError: the dim does not exist, or `process_group` is another group.
    """
    group = _tensor_parallel(process_group)
    dim, gather_dim = checked_dim(dim, tensor.shape), checked_dim(gather_dim, tensor.shape)
    if dim == gather_dim:
        found = parallel_argmax(tensor.movedim(dim, -1)).unsqueeze(dim)
    else:
        found = all_gather(tensor.argmax(dim=dim, keepdim=True), group, dim=gather_dim)
    return found if keepdim else found.squeeze(dim)


def topk(
    tensor: Tensor,
    k: int,
    dim: int,
    gather_dim: int,
    process_group: ProcessGroup | None = None,
    stages: int = 1,
    rank_id: Tensor | None = None,
    use_topk_rotated_kernel: bool = False,
    lnc: int = 2,
) -> tuple[Tensor, Tensor]:
    """Return the k largest values along a dim of the whole tensor, largest first, and their indices.

    Args:
        tensor: this rank's part.
        k: number of values; may exceed the length of a rank's part.
        dim: the dim to search.
        gather_dim: the dim along which the tensor is split over the ranks.
        process_group: the tensor-parallel group, or None.
        stages: accepted without effect, like `rank_id`, `use_topk_rotated_kernel` and `lnc`.
        rank_id: see above.
        use_topk_rotated_kernel: see above.
        lnc: see above.

    Returns:
        Values and int64 indices, the same on every rank: length k along `dim`, whole along `gather_dim`.

    Raises:
        ValueError: k exceeds the number of values, the dim does not exist, or `process_group` is another group.
    """
    group = _tensor_parallel(process_group)
    dim, gather_dim = checked_dim(dim, tensor.shape), checked_dim(gather_dim, tensor.shape)
    if dim == gather_dim:
        values, indices = parallel_topk(tensor.movedim(dim, -1), k)
        return values.movedim(-1, dim), indices.movedim(-1, dim)
    if not 1 <= k <= tensor.shape[dim]:
        raise ValueError(f"k={k} is outside 1..{tensor.shape[dim]}, the length of dim {dim}")
    values, indices = torch.topk(tensor, k, dim=dim)
    return all_gather(values, group, dim=gather_dim), all_gather(indices, group, dim=gather_dim)


def _tensor_parallel(process_group: ProcessGroup | Group | None) -> Group:
    group = active_group("tp")
    if process_group is not None and process_group is not group and process_group is not group.process_group:
        raise ValueError("process_group is not the tensor-parallel group of this mesh; remove it")
    return group


TOPK = 10  # candidates per Medusa head


class Sampler:
    """Draws one token per sequence among the `top_k` most likely.

    Args:
        neuron_config: its `hf_config` has `do_sample`, `num_beams` and `top_k`; with `is_medusa`, the sampler returns
            candidates instead of a token.

    Raises:
        ValueError: `do_sample` is False, or there are several beams.
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
        """Sample token ids `[batch]` from logits `[batch, vocab]`; candidates `[batch, top_k]` for Medusa."""
        if self.top_k == 1:
            return token_logits.argmax(dim=1)
        values, ids = token_logits.topk(self.top_k, dim=1)
        if self.is_medusa:
            return ids
        # Inverse transform sampling: torch.multinomial would inspect values while it is traced.
        reached = F.softmax(values, dim=1).cumsum(dim=1)
        drawn = torch.rand((reached.shape[0], 1), device=reached.device)
        place = (reached < drawn).sum(dim=1, keepdim=True).clamp(max=self.top_k - 1)
        return ids.gather(1, place).flatten()


def pad_path(path: Sequence[int], length: int, pad_value: int = -2) -> list[int]:
    """Pad a path with `pad_value` up to a length; longer paths stay unchanged."""
    return [*path, *[pad_value] * (length - len(path))]


def generate_medusa_buffers(medusa_choices: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return the constant tensors of a tree of candidates.

    Args:
        medusa_choices: the nodes below the root; each is a path, the candidate's rank at every depth. The ancestors of
            a node must be included.

    Returns:
        By name, for `n` nodes and the root: `medusa_attn_mask` `[1+n, 1+n]` float32, 1 where a node attends (itself,
        ancestors, root); `tree_indices` `[1+n]` int64, a node's index in the flat list of candidates;
        `medusa_position_ids` `[1+n]` int64, depths; `retrieve_indices` `[leaves, 1+depth]` int64, the nodes of the
        branch that ends at each leaf, padded with -1.

    Raises:
        ValueError: there is no path, or an ancestor is missing.
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
    """Return a step's candidates along the branches and along the tree.

    Args:
        medusa_logits: token ids predicted by each head, `[heads, 1, 1, TOPK]`.
        logits: token ids of the model itself, most likely first, `[1, 1, k]`.
        tree_indices: see `generate_medusa_buffers`.
        retrieve_indices: see `generate_medusa_buffers`.

    Returns:
        `[leaves, 1+depth]`, shorter branches padded with 0, and `[1, 1+n]`.
    """
    flat = torch.cat([logits.flatten()[:1], medusa_logits.reshape(-1)])
    tree = flat[tree_indices]
    branches = torch.cat([tree, tree.new_zeros(1)])[retrieve_indices]
    return branches, tree.unsqueeze(0)


def evaluate_posterior(logits: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Return the branch with the longest prefix that agrees with the model.

    Args:
        logits: token ids of the model after each token of a branch, most likely first, `[leaves, 1+depth, k]`.
        candidates: `[leaves, 1+depth]`.

    Returns:
        Index of the branch (the first among equals) and number of accepted candidates, both 0-d int64.
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
    """Append the accepted branch to the inputs.

    Args:
        input_ids: `[1, seq]`.
        candidates: see `generate_candidates`.
        best_candidate: see `evaluate_posterior`.
        accept_length: see `evaluate_posterior`.
        retrieve_indices: see `generate_medusa_buffers`.
        outputs: outputs of the model; not used.
        logits: `[leaves, 1+depth, ...]`.
        medusa_logits: `[heads, leaves, 1+depth, ...]`.
        new_token: number of generated tokens.

    Returns:
        `input_ids` `[1, seq+accepted+1]`; `logits` and `medusa_logits` at the last accepted token; `new_token`; and
        the accepted tokens' positions in the cache.
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
