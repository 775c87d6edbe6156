"""`nxd-ckpt verify` checks that a checkpoint is complete, and with `--deep`, that every byte is as saved."""

import dataclasses
import os
import warnings

import torch

from nxd_ckpt.boxes import Box
from nxd_ckpt.catalog import complete_tags
from nxd_ckpt.cli.formats import root_and_tag
from nxd_ckpt.cli.report import EXIT_DIFFERENT, EXIT_GOOD, Report, human_size, progress_bar
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.interop.huggingface.reading import read_header
from nxd_ckpt.manifest import Chunk, Manifest
from nxd_ckpt.reader import Checkpoint, open_checkpoint
from nxd_ckpt.safetensors_file import stored_name
from nxd_ckpt.stores import Store, check_tag, open_store
from nxd_ckpt.tensor_bytes import DTYPE_OF_CODE, in_safetensors


def verify(path: str, tag: str | None, *, deep: bool) -> Report:
    """Check an nxd checkpoint: the manifest's digest, that every element is stored, file sizes; if deep, all bytes.

    Raises:
        ValueError: the tag is not allowed.
        CheckpointError: there is no such checkpoint, or it cannot be read at all.
    """
    root, found = root_and_tag(path, tag)
    store = open_store(root)
    if found is not None and check_tag(found) not in store.tags():
        raise CheckpointError(f"there is no checkpoint {found!r} in {store.location}")
    try:
        checkpoint = open_checkpoint(root, found)
    except CheckpointError as error:
        # Without a tag there may be no checkpoint; with a tag, the manifest exists but is unusable.
        if found is None or isinstance(error.__cause__, OSError) or "upgrade" in str(error):
            raise
        return _report(found, 0, [str(error)], deep=deep)
    problems = _shallow_problems(checkpoint)
    if deep and not problems:
        problems = _deep_problems(store, checkpoint)
    return _report(checkpoint.tag, sum(checkpoint.manifest.files.values()), problems, deep=deep)


def verify_all(path: str, *, deep: bool) -> Report:
    """Check every checkpoint of a folder, oldest first; those with a damaged manifest come last.

    Raises:
        CheckpointError: there is no checkpoint, or one of them cannot be read at all.
    """
    store = open_store(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the damaged manifests that it warns of are reported below
        ordered = complete_tags(store)
    tags = dict.fromkeys([*ordered, *store.tags()])
    reports = [report for tag in tags if (report := _unless_deleted(store, tag, deep=deep)) is not None]
    if not reports:
        raise CheckpointError(f"there is no complete checkpoint in {store.location}")
    return Report(
        [report.data for report in reports],
        [line for report in reports for line in report.lines],
        max(report.exit_code for report in reports),
    )


def _unless_deleted(store: Store, tag: str, *, deep: bool) -> Report | None:
    """Verify a checkpoint; None if it was deleted meanwhile, as a run deletes old ones."""
    try:
        report = verify(store.location, tag, deep=deep)
    except CheckpointError:
        if tag in store.tags():
            raise
        return None
    return report if report.exit_code == EXIT_GOOD or tag in store.tags() else None


def _report(tag: str, num_bytes: int, problems: list[str], *, deep: bool) -> Report:
    data = {"tag": tag, "deep": deep, "good": not problems, "bytes": num_bytes, "problems": problems}
    if problems:
        return Report(data, [f"{tag}: damaged", *problems], EXIT_DIFFERENT)
    state, how = ("good", "every byte matches its checksum") if deep else ("complete", "contents not read, use --deep")
    return Report(data, [f"{tag}: {state}, {human_size(num_bytes)}; {how}"], EXIT_GOOD)


def _shallow_problems(checkpoint: Checkpoint) -> list[str]:
    """Find problems by planning to read everything and by reading the extra files, which are small."""
    everything = {name: [Box.whole(info.global_shape)] for name, info in checkpoint.tensors.items()}
    problems = []
    try:
        checkpoint.locate(everything)
        for name in checkpoint.extra:
            checkpoint.read_extra(name)
    except CheckpointError as error:
        problems.append(str(error))
    return problems


def _deep_problems(store: Store, checkpoint: Checkpoint) -> list[str]:
    problems = []
    with progress_bar("verify", sum(checkpoint.manifest.files.values())) as advance:
        for file, of_file in _by_file(checkpoint.manifest).items():
            part = Checkpoint(store, checkpoint.tag, of_file)
            problems.extend(part.damage() or _header_problems(file, part))
            advance(file, of_file.files[file])
    return problems


def _by_file(manifest: Manifest) -> dict[str, Manifest]:
    """Split the manifest by file, so that checking a file does not search the whole manifest."""
    chunks: dict[str, dict[str, list[Chunk]]] = {file: {} for file in manifest.files}
    for name, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            chunks[chunk.file].setdefault(name, []).append(chunk)
    return {
        file: dataclasses.replace(
            manifest,
            files={file: size},
            tensors={name: manifest.tensors[name]._replace(chunks=tuple(of)) for name, of in chunks[file].items()},
            extra={name: entry for name, entry in manifest.extra.items() if entry.file == file},
        )
        for file, size in manifest.files.items()
    }


def _header_problems(file: str, part: Checkpoint) -> list[str]:
    """Compare a file's header with the manifest. Our readers only verify its checksum, but other readers rely on it.

    Files of earlier saves are skipped, since they may also hold tensors that this checkpoint does not reference.
    """
    path = part.where(file)
    if not file.startswith(f"data/{part.save_id}") or not path.endswith(".safetensors") or not os.path.isfile(path):
        return []
    expected = {
        stored_name(name, chunk.box, entry.global_shape): (*_as_read(entry.dtype, chunk.box.shape), chunk.offset)
        for name, entry in part.manifest.tensors.items()
        for chunk in entry.chunks
    }
    try:
        header = read_header(path)
    except CheckpointError as error:
        return [str(error)]
    found = {key: (stored.info.dtype, stored.info.global_shape, stored.begin) for key, stored in header.items()}
    return [] if found == expected else [f"the header of {path} does not match the manifest"]


def _as_read(code: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape that `read_header` returns for a tensor stored with this code and shape."""
    if code == "F4" and shape:
        return DTYPE_OF_CODE[code], shape
    stored, stored_shape = in_safetensors(code, shape)
    return DTYPE_OF_CODE[stored], stored_shape
