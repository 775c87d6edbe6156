"""Finds the data files of a root that are in use by other checkpoints or by saves in progress.

A file's name is unique to the save that wrote it, so a file is in use if its name appears in any manifest. The text is
searched, since a damaged manifest may be repaired. A deletion first removes its own manifest and then checks here. An
incremental save first records which files it holds and then checks that their checkpoint still exists. So one of the
two sees the other, and no file is removed that a save goes on to reference.
"""

import re
import warnings
from collections.abc import Collection, Mapping

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.manifest import VERSION_ALONE, ManifestHead, decode_head, file_names_in
from nxd_ckpt.stores.heads import HEAD_BYTES
from nxd_ckpt.stores.interface import Store

_VERSION_BYTES = 128
_VERSION = re.compile(rb'"format":"nxd-ckpt","version":(\d+),')


def places_of(head: ManifestHead, tag: str) -> dict[str, str]:
    """Return the tag under which each file of a checkpoint is stored."""
    return {file: head.references.get(file, tag) for file in head.files}


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
