"""Reads existing tokens: `.npy`, flat `.bin`, and Megatron's pairs of `.bin` and `.idx`.

Files are memory-mapped and read in pieces. No length, offset or type in a file is trusted before it is checked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from nxd_data.sources import SourceFile

TokenDtype = Literal["uint16", "uint32", "int32", "int64"]
TOKEN_DTYPES: tuple[str, ...] = get_args(TokenDtype)
PIECE_TOKENS = 1 << 21

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, sequences, documents and one more
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}

Document = Iterable[NDArray[Any]]  # its tokens in pieces


def read_documents(files: Sequence[SourceFile], dtype: TokenDtype | None) -> Iterator[Document]:
    """Yield the documents of token files, unchanged; a `.npy` or flat `.bin` file is one document.

    Args:
        files: files from `find_tokens`.
        dtype: dtype of flat `.bin` files; other files declare theirs.

    Raises:
        ValueError: a file is damaged or has another format, or the dtype of a flat one is not given.
    """
    indexed = {file.path.with_suffix(".bin") for file in files if file.path.suffix == ".idx"}
    for file in files:
        if file.path.suffix == ".idx":
            yield from _megatron_documents(file.path)
        elif file.path.suffix == ".npy":
            yield _pieces(_npy_tokens(file.path))
        elif file.path not in indexed:
            yield _pieces(_flat_tokens(file.path, dtype))


def _pieces(tokens: NDArray[Any]) -> Document:
    return (tokens[start : start + PIECE_TOKENS] for start in range(0, len(tokens), PIECE_TOKENS))


def _npy_tokens(path: Path) -> NDArray[Any]:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy's reader raises many types for invalid headers
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"{path} is not a .npy file of numbers: {reason}; fix it, or remove it from data.path"
        ) from error
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        form = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else "an archive"
        raise ValueError(f"{path} holds {form}; expected one row of integers, such as uint16 [tokens]")
    return tokens


def _flat_tokens(path: Path, dtype: TokenDtype | None) -> NDArray[Any]:
    if dtype is None:
        raise ValueError(
            f"{path} has no .idx file beside it, so it is a flat file of tokens; set data.token_dtype to "
            f"{', '.join(TOKEN_DTYPES[:-1])} or {TOKEN_DTYPES[-1]}"
        )
    width, num_bytes = np.dtype(dtype).itemsize, path.stat().st_size
    if num_bytes % width:
        raise ValueError(
            f"{path} has {num_bytes} bytes, not a multiple of {width}: data.token_dtype={dtype} is not its type"
        )
    if not num_bytes:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")


def _megatron_documents(index_file: Path) -> Iterator[Document]:
    """Yield the documents that an `.idx` file names in the `.bin` file beside it."""
    dtype, lengths, offsets, bounds = _read_megatron_index(index_file)
    tokens_file = index_file.with_suffix(".bin")
    num_bytes = tokens_file.stat().st_size
    if len(lengths) and int((offsets + lengths * dtype.itemsize).max()) > num_bytes:
        raise ValueError(f"{index_file} names tokens past the end of {tokens_file.name}, which has {num_bytes} bytes")
    claimed = int(lengths.sum()) * dtype.itemsize
    if claimed > num_bytes:  # repeated bytes: a small pair could expand to any number of tokens
        raise ValueError(
            f"{index_file} names {claimed} bytes of tokens, but {tokens_file.name} has {num_bytes}; rebuild the pair"
        )
    tokens = np.memmap(tokens_file, dtype=np.uint8, mode="r") if num_bytes else np.empty(0, dtype=np.uint8)

    def document(first: int, last: int) -> Document:
        for sequence in range(first, last):
            start, end = int(offsets[sequence]), int(offsets[sequence] + lengths[sequence] * dtype.itemsize)
            yield from _pieces(tokens[start:end].view(dtype))

    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        yield document(first, last)


def _read_megatron_index(file: Path) -> tuple[np.dtype[Any], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Read the dtype; `[sequences]` lengths in tokens, and offsets in bytes; `[documents + 1]` first sequences."""
    content = file.read_bytes()
    if len(content) < _MEGATRON_HEADER.size or not content.startswith(_MEGATRON_MAGIC):
        raise ValueError(f"{file} is not a Megatron index; fix it, or remove it from data.path")
    _, version, code, num_sequences, num_bounds = _MEGATRON_HEADER.unpack_from(content)
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise ValueError(
            f"{file} has version {version} and type {code}; expected version 1 and a type of integers "
            f"({', '.join(map(str, _MEGATRON_DTYPES))})"
        )
    if len(content) < _MEGATRON_HEADER.size + 12 * num_sequences + 8 * num_bounds:
        raise ValueError(
            f"{file} is truncated: {num_sequences} sequences in {num_bounds - 1} documents do not fit in it"
        )
    at = _MEGATRON_HEADER.size
    lengths = np.frombuffer(content, "<i4", num_sequences, at).astype(np.int64)
    offsets = np.frombuffer(content, "<i8", num_sequences, at + 4 * num_sequences)
    bounds = np.frombuffer(content, "<i8", num_bounds, at + 12 * num_sequences)
    most = np.iinfo(np.int64).max // 16  # so that no sum below overflows
    is_order = len(bounds) and bounds[0] == 0 and bounds[-1] == num_sequences and (np.diff(bounds) >= 0).all()
    if not is_order or (lengths < 0).any() or (offsets < 0).any() or (offsets > most).any():
        raise ValueError(f"{file} is damaged: its lengths, offsets or documents are out of order; rebuild it")
    return np.dtype(_MEGATRON_DTYPES[code]).newbyteorder("<"), lengths, offsets, bounds
