"""Argmax and top-k of tensors that are split over ranks, along the dim that is searched or along another."""

import torch
from nxd_layers import parallel_argmax, parallel_topk
from nxd_state import Group, active_group, all_gather, checked_dim
from torch import Tensor
from torch.distributed import ProcessGroup


def argmax(
    tensor: Tensor,
    dim: int,
    gather_dim: int,
    keepdim: bool = False,
    process_group: ProcessGroup | None = None,
    disable_argmax_kernel: bool = False,
) -> Tensor:
    """Where the largest value is along a dim of the whole tensor; the lowest index among equal ones.

    Args:
        tensor: this rank's part.
        dim: the dim to search.
        gather_dim: the dim along which the tensor is split over the ranks.
        keepdim: keep `dim`, with length 1.
        process_group: process group; must be the tensor-parallel one.
        disable_argmax_kernel: accepted without effect.

    Returns:
        int64 indices, the same on every rank: of `tensor`'s shape without `dim`, whole along `gather_dim`.

    Raises:
        ValueError: the dim does not exist, or the group is another one.
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
    """The k largest values along a dim of the whole tensor, largest first, and where they are.

    Args:
        tensor: this rank's part.
        k: number of elements; may exceed the length of a rank's part.
        dim: the dim to search.
        gather_dim: the dim along which the tensor is split over the ranks.
        process_group: process group; must be the tensor-parallel one.
        stages: accepted without effect, like the following arguments.
        rank_id: as above.
        use_topk_rotated_kernel: as above.
        lnc: as above.

    Returns:
        Values in the dtype given and int64 indices, the same on every rank; of length k along `dim`, whole along
        `gather_dim`.

    Raises:
        ValueError: k exceeds the number of values, the dim does not exist, or the group is another one.
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
