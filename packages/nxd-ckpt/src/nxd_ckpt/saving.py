"""`save`: prepare, write and commit. All ranks agree on the success of each step before the next one starts."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nxd_ckpt import replicas
from nxd_ckpt.arguments import check_timeout, default_timeout
from nxd_ckpt.asynchronous.handle import wait_for_saves
from nxd_ckpt.boxes import Box
from nxd_ckpt.catalog import next_commit_time
from nxd_ckpt.checksums import hashes_of
from nxd_ckpt.coordinator import (
    Coordinator,
    ThisProcess,
    abandoned_on_error,
    coordinator_for,
    gather_from_every_rank,
    on_every_rank,
    on_rank_zero,
)
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.manifest import Chunk, ExtraEntry, HeaderEntry, Manifest, TensorEntry, data_file_name, extra_file_name
from nxd_ckpt.manifest_text import encode
from nxd_ckpt.messages import all_are, expect, parsed
from nxd_ckpt.safetensors_file import Hashes, file_parts, lay_out
from nxd_ckpt.save_task import SaveOptions, SaveTask, prepare_save
from nxd_ckpt.sharded_tensor import tensors_of
from nxd_ckpt.stores import open_store

if TYPE_CHECKING:
    import torch.distributed as dist


class _Written(NamedTuple):
    """One rank's report to the committing rank."""

    hashes: Hashes
    extra: dict[str, ExtraEntry]
    extra_sizes: dict[str, int]


def _written_from(message: Any) -> _Written:
    hashes, extra, sizes = message
    of_chunks = [tuple(of_chunk) for of_chunk in hashes]
    entries = {name: ExtraEntry(file, tuple(of_file)) for name, (file, of_file) in extra.items()}
    texts = [*chain(*of_chunks), *(text for entry in entries.values() for text in (entry.file, *entry.hashes))]
    expect(all_are(str, texts) and all_are(int, sizes.values()), "invalid hashes or sizes")
    return _Written(of_chunks, entries, sizes)


def save(
    path: "str | os.PathLike[str]",
    tag: str,
    state: Mapping[str, Any],
    *,
    objects: Any = None,
    rank_objects: Any = None,
    extra: Mapping[str, bytes] | None = None,
    mesh: Any = None,
    step: int | None = None,
    overwrite: bool = False,
    check_replicas: bool = False,
    incremental: bool = False,
    timeout: float | None = None,
    process_group: "dist.ProcessGroup | Coordinator | None" = None,
) -> None:
    """Write a checkpoint; when it returns, the checkpoint is complete and on disk. Call it on all ranks.

    Boxes held by several ranks are written once, with the work spread over their holders. Tensors may change again
    after it returns.

    Args:
        path: the folder for checkpoints, on a file system that all ranks share; created if missing.
        tag: name of this checkpoint, such as "step-1000".
        state: this rank's part of each logical tensor; a plain tensor is a whole one. Ranks may hold different names,
            but together they must hold every element of every tensor. Also modules, optimizers (with their module),
            torch's DTensors, objects with a `state_dict`, numbers and strings (those of rank 0 are saved), `PerRank`
            values, and dicts and lists of all these: see `nxd_ckpt.training_state`.
        objects: small JSON-serializable objects of the whole run; those of rank 0 are saved.
        rank_objects: small JSON-serializable objects of this rank, such as its position in the data.
        extra: files to store with the tensors, by name, such as {"tokenizer.json": b"..."}; those of rank 0 are saved.
        mesh: JSON-serializable description of the layout, for people and tools; rank 0's is saved. Loading does not
            need it.
        step: number that orders the checkpoints in this folder.
        overwrite: replace an existing checkpoint with this tag; the old one stays valid until the commit.
        check_replicas: refuse to save if ranks that hold the same box hold different bits; each rank hashes its copy.
        incremental: reference data that the newest checkpoint in the folder already holds instead of writing it
            again, if that one was saved with `incremental`, too. Each rank hashes its data before it writes.
        timeout: seconds to wait for the other ranks, at each step, before giving up; None: the value of
            `NXD_TIMEOUT`, else half an hour.
        process_group: the ranks; default: torch's default group if initialized, else this process alone.

    Raises:
        ValueError: a rank's arguments are invalid or do not match those of the others; nothing was written.
        CheckpointError: a rank could not write or did not answer, replicas differ, or the tag is taken. All ranks
            raise with the same text; an existing checkpoint is untouched.
    """
    timeout = default_timeout() if timeout is None else timeout
    coordinator = coordinator_for(process_group, timeout)
    options = SaveOptions(tag, step, overwrite, check_replicas, incremental, objects, rank_objects, extra, mesh)
    with abandoned_on_error(coordinator):
        wait_for_saves()
        task, sharded = prepare_save(path, state, options, coordinator, lambda: check_timeout(timeout))
        run_save(task, lambda: _write_tensors(task, tensors_of(sharded), coordinator.rank), coordinator)


def save_for_ranks(
    path: "str | os.PathLike[str]",
    tag: str,
    state: Mapping[str, Any],
    rank_objects: Mapping[int, Any],
    *,
    objects: Any,
    step: int | None,
    overwrite: bool,
    extra: Mapping[str, bytes] | None,
) -> None:
    """Save from this process alone what each of several ranks is to find as its `rank_objects`.

    The other arguments and errors are those of `save`.
    """
    coordinator = ThisProcess()
    options = SaveOptions(tag, step, overwrite, objects=objects, extra=extra)
    wait_for_saves()
    task, sharded = prepare_save(path, state, options, coordinator, lambda: None)
    task = replace(task, all_rank_objects=rank_objects)
    run_save(task, lambda: _write_tensors(task, tensors_of(sharded), coordinator.rank), coordinator)


def run_save(task: SaveTask, write_tensors: Callable[[], Hashes], coordinator: Coordinator) -> None:
    """Write and commit a prepared save. Call it for all ranks.

    Args:
        task: the result of `prepare_save`.
        write_tensors: function that writes the data file of `task.layout`, unless that is empty, and returns its
            hashes.
        coordinator: the connection to the other ranks.

    Raises:
        CheckpointError: as for `save`.
    """
    transaction = task.transaction
    doing = f"saving checkpoint {task.options.tag!r} to {task.location}"
    try:
        on_rank_zero(coordinator, doing, lambda: _begin(task))
        sent = gather_from_every_rank(coordinator, doing, lambda: _write(task, write_tensors, coordinator.rank))
        written = parsed(sent, _written_from, doing)
        if task.options.check_replicas:
            hashes = [of_rank.hashes for of_rank in written]
            on_every_rank(coordinator, doing, lambda: replicas.check_replicas(task.plan, task.replica_hashes, hashes))
        on_rank_zero(coordinator, doing, lambda: _commit(task, written))
    finally:
        transaction.end()


def _begin(task: SaveTask) -> None:
    task.transaction.begin()
    if task.base is not None:
        task.base.take(open_store(task.location), task.transaction)


def _write_tensors(task: SaveTask, tensor_of: Callable[[str, Box], torch.Tensor], rank: int) -> Hashes:
    hashes: Hashes = []
    if task.layout.placed:
        file = data_file_name(task.save_id, rank)
        task.transaction.write_file(file, file_parts(task.layout, tensor_of, hashes), task.layout.size)
    return hashes


def _write(task: SaveTask, write_tensors: Callable[[], Hashes], rank: int) -> _Written:
    hashes = write_tensors()
    extra: dict[str, ExtraEntry] = {}
    sizes: dict[str, int] = {}
    if rank == 0:
        for name, content in (task.options.extra or {}).items():
            extra[name] = ExtraEntry(extra_file_name(task.save_id, name), hashes_of([content]))
            sizes[extra[name].file] = len(content)
            task.transaction.write_file(extra[name].file, [content], len(content))
    return _Written(hashes, extra, sizes)


def _commit(task: SaveTask, written: list[_Written]) -> None:
    files: dict[str, int] = dict(written[0].extra_sizes)
    headers: dict[str, HeaderEntry] = {}
    chunks: dict[str, list[Chunk]] = {name: [] for name in task.plan.tensors}
    for rank, writes in enumerate(task.plan.writes):
        if writes:
            layout = lay_out(writes, task.plan.tensors)
            file = data_file_name(task.save_id, rank)
            files[file] = layout.size
            headers[file] = HeaderEntry(len(layout.header), hashes_of([layout.header]))
            for write, hashes in zip(layout.placed, written[rank].hashes, strict=True):
                digest = task.digests.get((write.name, write.box), "")
                chunks[write.name].append(Chunk(file, write.offset, write.num_bytes, write.box, hashes, digest))
    _check_sizes(task, files)
    options = task.options
    references: dict[str, str] = {}
    if task.base is not None:
        task.base.check_files(open_store(task.location))
        for name, taken in task.base.chunks.items():
            chunks[name].extend(taken)
        files |= task.base.files
        headers |= task.base.headers
        references = {file: tag for file, tag in task.base.places.items() if tag != options.tag}
    manifest = Manifest(
        save_id=task.save_id,
        step=options.step,
        committed_at=next_commit_time(open_store(task.location)),
        world_size=len(written),
        mesh=options.mesh,
        files=files,
        tensors={
            name: TensorEntry(tensor.dtype, tensor.global_shape, tuple(chunks[name]))
            for name, tensor in task.plan.tensors.items()
        },
        extra=written[0].extra,
        objects=options.objects,
        rank_objects=task.all_rank_objects,
        headers=headers,
        references=references,
    )
    task.transaction.commit(encode(manifest))


def _check_sizes(task: SaveTask, files: Mapping[str, int]) -> None:
    problems = []
    for file, expected in files.items():
        try:
            found = task.transaction.file_size(file)
        except FileNotFoundError:
            problems.append(f"{file} is missing")
            continue
        if found != expected:
            problems.append(f"{file} has {found} bytes, expected {expected}")
    if problems:
        raise CheckpointError("files are missing or have the wrong size after the write: " + "; ".join(problems))
