"""The cache on disk, keyed by content: compiled programs, and whole traces without their weights.

An entry is a folder named by its key. It is written under another name and renamed, so it is complete or absent.
Loading a program may run code from its files, so an entry that is damaged, or that another user could have written, is
rebuilt.
"""

import hashlib
import json
import os
import shutil
import stat
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from nxd_state import private_folder

from nxd_trace.errors import ModelFolderError
from nxd_trace.manifest import KEPT, WEIGHTS, RankManifest, rank_folder, sha256_of, system_name, torch_version
from nxd_trace.programs import Signature
from nxd_trace.weights import WeightSource, open_safetensors, save_safetensors

_HASHES, _PROGRAMS = "hashes.json", "programs.json"
_MADE_BY = ("nxd_trace", "nxd_state")


@dataclass(frozen=True)
class TraceContent:
    """Identifies a trace, so that an equal earlier trace is reused.

    Attributes:
        made_of: JSON-serializable values that the recorded graphs depend on, such as the model's sizes and the versions
            of the code that builds it. The trace adds its programs and settings, the names, shapes and dtypes of the
            weights, and the versions of torch, this package and nxd-state.
        check: function called in this process before a new trace; its errors propagate.
    """

    made_of: Mapping[str, Any]
    check: Callable[[], object] = lambda: None


@cache
def source_digest(*packages: str) -> str:
    """Hash all Python files of these packages, without importing them.

    Raises:
        ValueError: a package is not installed.
    """
    digest = hashlib.sha256()
    for package in packages:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"package {package!r} not found; install it")
        for folder in map(Path, spec.submodule_search_locations):
            for path in sorted(folder.rglob("*.py")):
                digest.update(f"{path.relative_to(folder)} {sha256_of(path)}\n".encode())
    return digest.hexdigest()


def program_key(**made_of: Any) -> str:
    """Return the key of a compiled program that depends on these JSON values, torch and the machine."""
    text = json.dumps([system_name(), torch_version(), made_of], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def trace_key(source: WeightSource, **made_of: Any) -> str:
    """Return the key of a whole trace: like `program_key`, plus this package's code and the weights' descriptions."""
    weights = {name: [str(tensor.dtype), list(tensor.global_shape)] for name, tensor in source.tensors.items()}
    return program_key(weights=weights, code=source_digest(*_MADE_BY), **made_of)


class ArtifactCache:
    """Cached folders of compiled programs and traces, by key; by default in the user's cache folder."""

    def __init__(self, folder: str | Path | None) -> None:
        if not folder:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nxd_trace"
        self._folder = Path(folder)

    def has(self, key: str) -> bool:
        """Whether there is an entry, valid or not."""
        return (self._folder / key).exists()

    def copy_to(self, key: str, destination: Path) -> bool:
        """Copy an entry's files into a folder; returns False if there is no intact entry that this user owns."""
        entry = self._folder / key
        try:
            if not (entry.exists() and private_folder(self._folder) and _is_own(entry.lstat())):
                return False
            hashes = json.loads((entry / _HASHES).read_text(encoding="utf-8"))
            names = [str(path.relative_to(entry)) for path in entry.rglob("*") if path.is_file()]
            names.remove(_HASHES)  # the files that exist here: paths in the list may point elsewhere
            if {"key": key, "files": {name: sha256_of(entry / name) for name in names}} != hashes:
                return False
            for name in names:
                (destination / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(entry / name, destination / name)
        except (OSError, ValueError):
            return False
        return True

    def add(self, key: str, made: Path) -> None:
        """Store a copy of the folder `made` as this key's entry, replacing an unusable one.

        Warns and stores nothing if other users can write to the cache, or the disk is full or read-only.
        """
        try:
            private_folder(self._folder)
            self._copy_in(key, made)
        except OSError as error:
            why = error.args[0][0][-1] if isinstance(error, shutil.Error) else error.strerror or str(error)
            warnings.warn(
                f"{self._folder} cannot store compiled programs, so the next start compiles them again: {why}; "
                "make room there, or set XDG_CACHE_HOME",
                stacklevel=1,  # always the same place, so that the warning is shown once
            )

    def _copy_in(self, key: str, made: Path) -> None:
        new = Path(mkdtemp(prefix=f".{key}-", dir=self._folder))
        try:
            shutil.copytree(made, new, dirs_exist_ok=True)
            new.chmod(0o700)  # copytree copied the mode of `made`
            files = {str(path.relative_to(new)): sha256_of(path) for path in new.rglob("*") if path.is_file()}
            (new / _HASHES).write_text(json.dumps({"key": key, "files": files}), encoding="utf-8")
            shutil.rmtree(self._folder / key, ignore_errors=True)
            new.rename(self._folder / key)
        except OSError:
            if not (self._folder / key / _HASHES).is_file():  # otherwise another process stored it first
                raise
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def add_trace(self, key: str, made: Path, programs: Sequence[Signature], source: WeightSource) -> None:
        """Store a trace: signatures, each rank's manifest, and buffers that the source of weights lacks.

        Its programs are separate entries. A trace whose state does not start as zeros is not stored.
        """
        ranks = sorted(path.name for path in made.glob("tp_rank_*"))
        with TemporaryDirectory(prefix="nxd_trace_") as scratch:
            for rank in ranks:
                manifest, folder = RankManifest.read(made / rank), Path(scratch) / rank
                if not all(state.zeros for state in manifest.states.values()):
                    return
                folder.mkdir()
                manifest.write(folder)
                with open_safetensors(made / rank / WEIGHTS) as stored:
                    kept = [name for name, it in manifest.weights.items() if not it.is_filled_from(source, name)]
                    save_safetensors({name: stored.get_tensor(name) for name in kept}, folder / KEPT)
            (Path(scratch) / _PROGRAMS).write_text(json.dumps([program.to_json() for program in programs]))
            self.add(key, Path(scratch))

    def copy_trace_to(self, key: str, num_ranks: int, destination: Path) -> tuple[Signature, ...] | None:
        """Copy a trace and its programs, without weights, into a new folder.

        Returns:
            The programs' signatures; None if there is no such trace or part of it is unusable.
        """
        try:
            if not self.copy_to(key, destination):
                return None
            file = destination / _PROGRAMS
            signatures = tuple(map(Signature.from_json, json.loads(file.read_text(encoding="utf-8"))))
            file.unlink()
            ranks = [RankManifest.read(destination / rank_folder(rank)) for rank in range(num_ranks)]
        except (OSError, KeyError, TypeError, ValueError, ModelFolderError):
            return None
        folders = {program.folder for rank in ranks for program in rank.programs}
        is_whole = all(self.copy_to(Path(folder).name, destination / folder) for folder in folders)
        return signatures if is_whole else None


def _is_own(status: os.stat_result) -> bool:
    """Whether this is a folder that only this user can write to."""
    may_others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not may_others_write
