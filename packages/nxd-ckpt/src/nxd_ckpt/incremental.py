"""Incremental saves: data that the newest checkpoint in the folder already holds is referenced, not written again.

Each rank splits its data into chunks of at most 1 MiB and hashes each before anything is written. Rank 0 looks up the
hashes in the manifest of the newest checkpoint, and tells all ranks which chunks are left to write. A chunk matches a
stored one if dtype, number of bytes and XXH3-128 are equal, no matter its name, position and layout. Unless the bytes
were chosen to collide, a false match is as likely as guessing 128 bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import xxhash

from nxd_ckpt.boxes import Box
from nxd_ckpt.catalog import newest_readable, read_head
from nxd_ckpt.checksums import BlockHasher
from nxd_ckpt.coordinator import Coordinator, gather_from_every_rank, on_rank_zero
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.manifest import Chunk, HeaderEntry, Manifest
from nxd_ckpt.messages import all_are, expect, parsed
from nxd_ckpt.plan import PlannedWrite, SavePlan
from nxd_ckpt.safetensors_file import Hashes, in_file_order
from nxd_ckpt.stores import SaveTransaction, Store
from nxd_ckpt.tensor_bytes import tensor_parts

# Smaller chunks find more unchanged data if some rows of a tensor change, larger ones keep the manifest small: this is
# 200 KB of manifest per GB.
CHUNK_BYTES = 2**20

_Key = tuple[str, int, str]  # dtype, bytes, XXH3-128


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint that a save takes chunks from; only on rank 0.

    Attributes:
        tag: its name.
        save_id: the save that wrote it.
        chunks: the chunks taken, by the tensor that they become a part of.
        files: sizes of the files that hold them.
        headers: headers of these files, if known.
        places: the tag under which each of these files is stored.
    """

    tag: str
    save_id: str
    chunks: Mapping[str, Sequence[Chunk]]
    files: Mapping[str, int]
    headers: Mapping[str, HeaderEntry]
    places: Mapping[str, str]

    def take(self, store: Store, transaction: SaveTransaction) -> None:
        """Hold the files and check that they are still the chosen ones. Called after `begin`.

        Raises:
            CheckpointError: the checkpoint or one of the files is gone.
        """
        transaction.hold(self.files)
        try:
            if read_head(store, self.tag).save_id != self.save_id:
                raise CheckpointError("it was overwritten")
            self.check_files(store)
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint {self.tag!r}, whose data this incremental save references, has changed: {error}; save "
                "again"
            ) from None

    def check_files(self, store: Store) -> None:
        """Check the files again.

        Raises:
            CheckpointError: a file is missing or has another size; names it.
        """
        for file, size in self.files.items():
            if not _is_there(store, self.places[file], file, size):
                raise CheckpointError(f"data file {store.where(self.places[file], file)} is missing or damaged")


@dataclass(frozen=True, slots=True)
class Increment:
    """The part of a save that is left to write.

    Attributes:
        plan: the writes of all ranks; its tensors are those of the whole checkpoint.
        digests: the XXH3-128 of every chunk to write, by name and box.
        base: the source of the other chunks; None if there are none, and on all ranks but 0.
    """

    plan: SavePlan
    digests: Mapping[tuple[str, Box], str] = field(default_factory=dict)
    base: Base | None = None


class _Fingerprints(NamedTuple):
    """The XXH3-128 and block hashes of one rank's chunks, in the order of its file."""

    digests: list[str]
    hashes: Hashes


def _fingerprints_from(message: Any) -> _Fingerprints:
    digests, hashes = message
    expect(all_are(str, [*digests, *(text for of_chunk in hashes for text in of_chunk)]), "invalid hashes")
    return _Fingerprints(list(digests), [tuple(of_chunk) for of_chunk in hashes])


def find_increment(
    store: Store, plan: SavePlan, tensor_of: Callable[[str, Box], torch.Tensor], coordinator: Coordinator, doing: str
) -> tuple[Increment, list[Hashes]]:
    """Find the data that has to be written. Call it on all ranks.

    Args:
        store: the root; only rank 0 reads it.
        plan: the writes of a full save, in chunks of at most `CHUNK_BYTES`.
        tensor_of: function that returns this rank's elements of a name and box.
        coordinator: the connection to the other ranks.
        doing: the operation, for messages.

    Returns:
        The increment, and each rank's block hashes of its full save, in the order of its file.

    Raises:
        CheckpointError: a rank's tensors or the store cannot be read.
    """
    chunks = [in_file_order(writes, plan.tensors) for writes in plan.writes]
    mine = chunks[coordinator.rank]
    sent = gather_from_every_rank(coordinator, doing, lambda: _fingerprints_of(mine, tensor_of))
    found = parsed(sent, _fingerprints_from, doing)
    for rank, (of_rank, fingerprints) in enumerate(zip(chunks, found, strict=True)):
        if not len(of_rank) == len(fingerprints.digests) == len(fingerprints.hashes):
            raise CheckpointError(
                f"{doing} failed: rank {rank} hashed {len(fingerprints.digests)} chunks, not {len(of_rank)}"
            )
    digests = [fingerprints.digests for fingerprints in found]
    base: Base | None = None

    def choose() -> list[str]:
        nonlocal base
        base, taken = _choose(store, plan, chunks, digests)
        return ["".join("01"[is_taken] for is_taken in of_rank) for of_rank in taken]

    flags: list[str] = on_rank_zero(coordinator, doing, choose)
    writes: list[list[PlannedWrite]] = []
    written: dict[tuple[str, Box], str] = {}
    for of_rank, of_digests, of_flags in zip(chunks, digests, flags, strict=True):
        kept = [
            (write, digest) for write, digest, flag in zip(of_rank, of_digests, of_flags, strict=True) if flag == "0"
        ]
        writes.append([write for write, _ in kept])
        written.update(((write.name, write.box), digest) for write, digest in kept)
    return Increment(SavePlan(plan.tensors, writes), written, base), [fingerprints.hashes for fingerprints in found]


def _fingerprints_of(writes: Sequence[PlannedWrite], tensor_of: Callable[[str, Box], torch.Tensor]) -> _Fingerprints:
    found = _Fingerprints([], [])
    for write in writes:
        whole, blocks = xxhash.xxh3_128(), BlockHasher()
        for part in tensor_parts(tensor_of(write.name, write.box)):
            whole.update(part)
            blocks.update(part)
        found.digests.append(whole.hexdigest())
        found.hashes.append(blocks.hashes())
    return found


def _choose(
    store: Store, plan: SavePlan, chunks: Sequence[Sequence[PlannedWrite]], digests: Sequence[Sequence[str]]
) -> tuple[Base | None, list[list[bool]]]:
    """Choose the chunks to take from the newest checkpoint; also returns which of each rank's chunks are taken."""
    newest = newest_readable(store)
    stored = _stored_chunks(store, *newest) if newest else {}
    taken: list[list[bool]] = []
    found: dict[str, list[Chunk]] = {}
    for of_rank, of_digests in zip(chunks, digests, strict=True):
        flags = []
        for write, digest in zip(of_rank, of_digests, strict=True):
            held = stored.get((plan.tensors[write.name].dtype, write.num_bytes, digest))
            flags.append(held is not None)
            if held is not None:
                found.setdefault(write.name, []).append(held._replace(box=write.box))
        taken.append(flags)
    if newest is None or not found:
        return None, taken
    tag, manifest = newest
    files = sorted({chunk.file for of_tensor in found.values() for chunk in of_tensor})
    base = Base(
        tag=tag,
        save_id=manifest.save_id,
        chunks=found,
        files={file: manifest.files[file] for file in files},
        headers={file: manifest.headers[file] for file in files if file in manifest.headers},
        places={file: manifest.references.get(file, tag) for file in files},
    )
    return base, taken


def _stored_chunks(store: Store, tag: str, manifest: Manifest) -> dict[_Key, Chunk]:
    """Return a checkpoint's chunks that have an XXH3-128, in files that exist."""
    there = {
        file
        for file, size in manifest.files.items()
        if _is_there(store, manifest.references.get(file, tag), file, size)
    }
    return {
        (entry.dtype, chunk.num_bytes, chunk.xxh128): chunk
        for entry in manifest.tensors.values()
        for chunk in entry.chunks
        if chunk.xxh128 and chunk.file in there
    }


def _is_there(store: Store, tag: str, file: str, size: int) -> bool:
    try:
        return store.file_size(tag, file) == size
    except OSError:
        return False
