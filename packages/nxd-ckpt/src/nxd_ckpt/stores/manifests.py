"""Reads the manifests in a store, and finds the data files that they need.

The first line of a manifest holds the age of the checkpoint and the files that it needs. It is small no matter how
large the checkpoint is, so listing a folder is cheap. If it is not enough, as in a damaged manifest or one of an
earlier version, the whole text is read.

A file's name is unique to the save that wrote it, so a file is in use if its name appears in any manifest. The text is
searched, since a damaged manifest may be repaired. A deletion first removes its own manifest and then checks here. An
incremental save first records which files it holds and then checks that their checkpoint still exists. So one of the
two sees the other, and no file is removed that a save goes on to reference.
"""

import re
import warnings
from collections.abc import Collection, Iterable, Mapping

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.manifest import MANIFEST_NAME, Manifest, ManifestHead, file_names_in
from nxd_ckpt.manifest_text import VERSION_ALONE, decode, decode_head
from nxd_ckpt.stores.interface import ReadRange, Store

HEAD_BYTES = 2**16  # holds the first line of a manifest of 900 files

_LONG_HEAD_BYTES = 2**24
_VERSION_BYTES = 128
_VERSION = re.compile(rb'"format":"nxd-ckpt","version":(\d+),')


def read_heads(store: Store) -> tuple[list[tuple[str, ManifestHead]], list[str]]:
    """Return tags and heads of all checkpoints, oldest first, and the problems of unusable ones. Checkpoints that are
    deleted in the meantime are in neither list.

    Raises:
        OSError: the storage fails.
    """
    found: list[tuple[str, ManifestHead]] = []
    problems: list[str] = []
    for tag, beginning, num_bytes in store.beginnings(HEAD_BYTES):
        try:
            found.append((tag, _head_of(store, tag, beginning, num_bytes)))
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            problems.append(str(error))
    found.sort(key=lambda item: item[1].order)
    return found, problems


def read_head(store: Store, tag: str) -> ManifestHead:
    """Return the head of one manifest.

    Raises:
        FileNotFoundError: there is no such manifest.
        CheckpointError: it is damaged or cannot be read.
    """
    try:
        num_bytes = store.file_size(tag, MANIFEST_NAME)
        beginning = _beginning(store, tag, min(num_bytes, HEAD_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(store.where(tag)) from None
    except (OSError, CheckpointError):  # reading it whole gives the reason
        return read_manifest(store, tag).head
    return _head_of(store, tag, beginning, num_bytes)


def read_manifest(store: Store, tag: str) -> Manifest:
    """Return a whole manifest with every field checked; raises the errors of `read_head`."""
    return decode(read_text(store, tag), store.where(tag))


def read_text(store: Store, tag: str) -> bytes:
    """Return the raw text of a manifest; raises the errors of `read_head`."""
    try:
        return store.read_manifest(tag)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{store.where(tag)} cannot be read: {error}") from error


def check_files(store: Store, tag: str, checkpoint: Manifest | ManifestHead, files: Iterable[str]) -> None:
    """Check that files of a checkpoint exist with the right sizes.

    Raises:
        CheckpointError: a file is missing or has the wrong size; names all of them.
    """
    problems = []
    for file in files:
        owner, expected = checkpoint.references.get(file, tag), checkpoint.files[file]
        where = store.where(owner, file)
        try:
            found = store.file_size(owner, file)
        except FileNotFoundError:
            whose = f"; checkpoint {tag!r} references it in {owner!r}" if file in checkpoint.references else ""
            problems.append(f"data file {where} is missing{whose}")
            continue
        except OSError as error:
            problems.append(f"data file {where} cannot be read: {error}")
            continue
        if found != expected:
            problems.append(f"data file {where} has {found} bytes, expected {expected}")
    if problems:
        raise CheckpointError("; ".join(problems))


def _head_of(store: Store, tag: str, beginning: bytes, num_bytes: int | None) -> ManifestHead:
    head = decode_head(beginning, num_bytes)
    if head is None and num_bytes is not None and len(beginning) < num_bytes and b"\n" not in beginning:
        try:
            head = decode_head(_beginning(store, tag, min(num_bytes, _LONG_HEAD_BYTES)), num_bytes)
        except (OSError, CheckpointError):
            head = None  # reading it whole gives the reason
    return head or read_manifest(store, tag).head


def _beginning(store: Store, tag: str, num_bytes: int) -> bytes:
    text = bytearray(num_bytes)
    store.read_into(tag, MANIFEST_NAME, [ReadRange(0, memoryview(text))])
    return bytes(text)


def places_of(head: ManifestHead, tag: str) -> dict[str, str]:
    """Return the tag under which each file of a checkpoint is stored."""
    return {file: head.references.get(file, tag) for file in head.files}


def places_in(store: Store, tag: str) -> dict[str, str] | None:
    """Return the tag under which each file of a checkpoint is stored; None if its manifest is damaged.

    Raises:
        FileNotFoundError: there is no such manifest.
        CheckpointError: it cannot be read, or it is of a newer version.
    """
    try:
        return places_of(read_head(store, tag), tag)
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError) or "upgrade" in str(error):
            raise
        return None


def files_in_use(store: Store, places: Mapping[str, str]) -> set[str]:
    """Return the files that a save in progress holds or a checkpoint needs.

    Args:
        store: the root.
        places: the tag under which each file is stored, by file.

    Raises:
        OSError: the storage fails.
    """
    held = store.held() if places else set()  # before the manifests, as a save drops its hold once its own exists
    return (held & places.keys()) | files_in_manifests(store, places)


def files_in_manifests(store: Store, places: Mapping[str, str]) -> set[str]:
    """Return the files that a manifest lists; takes the arguments of `files_in_use`.

    An unreadable manifest may list all of them; a warning names it.

    Raises:
        OSError: the storage fails.
    """
    found: set[str] = set()
    here = set(places.values())
    for tag, beginning, num_bytes in store.beginnings(HEAD_BYTES) if places else ():
        try:
            if (head := decode_head(beginning, num_bytes)) is not None:
                found |= head.files.keys() & places.keys()
            elif tag in here or _can_reference(beginning):
                found |= file_names_in(store.read_manifest(tag)) & places.keys()
        except FileNotFoundError:  # deleted meanwhile
            continue
        except (OSError, CheckpointError) as error:
            warnings.warn(
                f"{store.where(tag)} cannot be read, so no data is removed that it may reference: {error}", stacklevel=2
            )
            return set(places)
    return found


def by_place(files: Collection[str], places: Mapping[str, str]) -> dict[str, list[str]]:
    """Group the files by tag."""
    found: dict[str, list[str]] = {}
    for file in files:
        found.setdefault(places[file], []).append(file)
    return found


def _can_reference(beginning: bytes) -> bool:
    """Whether a manifest's version allows references: most manifests need not be read further."""
    version = _VERSION.search(beginning, 0, _VERSION_BYTES)
    return version is None or int(version[1]) != VERSION_ALONE
