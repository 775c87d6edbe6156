"""Compiled programs kept by what they were made of, so that the same graph is compiled once per machine.

An entry is a folder named by its key. It is made beside the others and renamed, so it is whole or not there.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from nxd_trace.manifest import sha256_of, system_name, torch_version

_HASHES = "hashes.json"


def default_cache_folder() -> Path:
    """`nxd_trace` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nxd_trace"


def program_key(**made_of: Any) -> str:
    """A key for all that a compiled program depends on: these JSON-able values, torch and the machine."""
    text = json.dumps([system_name(), torch_version(), made_of], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class ArtifactCache:
    """Compiled programs by key.

    Args:
        folder: where they are; made if needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def copy_to(self, key: str, destination: Path) -> bool:
        """Copy an entry's files into a new folder; False if there is no (undamaged) entry."""
        entry = self._folder / key
        try:
            hashes = json.loads((entry / _HASHES).read_text(encoding="utf-8"))
            if any(sha256_of(entry / name) != expected for name, expected in hashes.items()):
                return False
            for name in hashes:
                (destination / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(entry / name, destination / name)
        except (OSError, ValueError):
            return False
        return True

    def add(self, key: str, made: Path) -> None:
        """Keep a copy of the folder `made` as the entry of this key, in place of one that was damaged."""
        self._folder.mkdir(parents=True, exist_ok=True)
        new = Path(mkdtemp(prefix=f".{key}-", dir=self._folder))
        try:
            shutil.copytree(made, new, dirs_exist_ok=True)
            hashes = {str(path.relative_to(new)): sha256_of(path) for path in new.rglob("*") if path.is_file()}
            (new / _HASHES).write_text(json.dumps(hashes), encoding="utf-8")
            shutil.rmtree(self._folder / key, ignore_errors=True)
            new.rename(self._folder / key)
        except OSError:
            if not (self._folder / key / _HASHES).is_file():  # else another process was faster
                raise
        finally:
            shutil.rmtree(new, ignore_errors=True)
