"""Which data files of a root are in use by checkpoints, or by saves under way, that do not lie with them.

A file's name is unique to the save that wrote it, so a file is in use wherever its name stands in a manifest; that is
looked for in the text, since one that is damaged may be mended. Whoever deletes first takes his own manifest away, and
then asks here. An incremental save first says which files it holds, and then looks whether the checkpoint that they
belong to is still there. So one of the two sees the other, and no file is removed that somebody goes on to reference.
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
    """Under which tag each file of a checkpoint lies."""
    return {file: head.references.get(file, tag) for file in head.files}


def files_in_use(store: Store, places: Mapping[str, str]) -> set[str]:
    """Those of the files that a save under way holds, or that a checkpoint needs.

    Args:
        store: the root.
        places: by file, under which tag it lies.

    Raises:
        OSError: the storage fails.
    """
    held = store.held() if places else set()  # before the manifests, as a save lets go when its own is there
    return (held & places.keys()) | files_in_manifests(store, places)


def files_in_manifests(store: Store, places: Mapping[str, str]) -> set[str]:
    """Those of the files that a manifest speaks of; arguments as for `files_in_use`.

    A manifest that cannot be read may speak of all of them; a warning names it.

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
    """The files under each tag."""
    found: dict[str, list[str]] = {}
    for file in files:
        found.setdefault(places[file], []).append(file)
    return found


def _can_reference(beginning: bytes) -> bool:
    """Whether its version allows that: most manifests need not be read further than that."""
    version = _VERSION.search(beginning, 0, _VERSION_BYTES)
    return version is None or int(version[1]) != VERSION_ALONE
