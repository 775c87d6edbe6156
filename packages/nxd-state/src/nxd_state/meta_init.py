"""Giving memory to tensors on the "meta" device, and seeds of initial values that do not depend on the sharding."""

import hashlib

import torch
from torch import Tensor, nn


@torch.no_grad()
def allocate_meta_tensor(tensor: Tensor) -> None:
    """Give a tensor on the meta device memory on the CPU; it stays the same object, with its attributes.

    Floating-point numbers begin as `nan`, so that an unset value is noticed; others as zero.
    """
    made = torch.empty_like(tensor, device="cpu")
    made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    if made.is_floating_point():
        made.fill_(torch.nan)
    else:
        made.zero_()
    made.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, made)


def seed_of_module(seed: int, name: str) -> int:
    """A seed for the initial values of the module `name`, which depends on nothing else: below 2**63."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
