"""A digest of a tensor's bytes at the speed of memory, and its largest value.

Each row of 32 KiB is one sum of products: its 64-bit words times odd constants, each product folded so that its upper
bits reach the lower ones, modulo 2^64. The digest is that of the sums. It tells mistakes apart, not attacks: two
tensors that differ have equal digests with a probability of about 2^-60 for each row.
"""

import ctypes
import hashlib
from functools import cache

import torch
from torch import Tensor

WORDS = 4096  # of 64 bits in a row
ROWS = 32  # that are multiplied at once: 1 MiB, which fits into a core's cache


def digest_of(value: Tensor) -> str:
    """Return the digest of a contiguous CPU tensor's bytes."""
    data = value.reshape(-1).view(torch.uint8) if value.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")
    whole = len(data) // (8 * WORDS) * 8 * WORDS
    digest = hashlib.sha256(bytes_of(data[whole:]))
    if whole:
        sums = _sums_of_rows(data[:whole])
        digest.update(bytes_of(sums))
    return digest.hexdigest()[:32]


def bytes_of(value: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, which must live as long as it is used.

    Not by `numpy()`, after which a program could not free a parameter's memory by resizing it, as sharding does.
    """
    return memoryview((ctypes.c_char * value.nbytes).from_address(value.data_ptr() if value.nbytes else 1)).cast("B")


def _sums_of_rows(data: Tensor) -> Tensor:
    if data.storage_offset() % 8:
        data = data.clone()
    rows = data.view(torch.int64).view(-1, WORDS)
    sums = torch.empty(len(rows), dtype=torch.int64, device="cpu")
    products, folded = (torch.empty(min(ROWS, len(rows)), WORDS, dtype=torch.int64, device="cpu") for _ in range(2))
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        product, fold = products[: len(part)], folded[: len(part)]
        torch.mul(part, _constants(), out=product)
        torch.bitwise_right_shift(product, 32, out=fold)
        torch.sum(product.bitwise_xor_(fold), dim=1, out=sums[start : start + ROWS])
    return sums


@cache
def _constants() -> Tensor:
    """Odd numbers of 64 bits, the same on every machine: those of SplitMix64."""
    found, mask = [], 2**64 - 1
    for number in range(1, WORDS + 1):
        word = number * 0x9E3779B97F4A7C15 & mask
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & mask
        word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
        word = (word ^ word >> 31) | 1
        found.append(word - 2**64 if word >= 2**63 else word)
    with torch.inference_mode(False):
        return torch.tensor(found, dtype=torch.int64, device="cpu")


def largest_of(value: Tensor) -> float:
    """Return the largest absolute value of a tensor; NaN if it has one, 0 if it is empty."""
    if not value.numel():
        return 0.0
    if value.dtype.itemsize == 1:  # of which torch knows no least and greatest float8
        value = value.float()
    low, high = torch.aminmax(value)
    return max(abs(float(low)), abs(float(high)))
