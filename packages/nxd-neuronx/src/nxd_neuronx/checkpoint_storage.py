"""Storage of a script's own files beside its checkpoints: texts and tensors in a folder, or behind a URL.

`save_checkpoint` and `load_checkpoint` use the stores of nxd_ckpt instead. What is loaded here is read with torch's
restricted unpickler: nothing in a file is executed.
"""

import fnmatch
import os
import posixpath
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from nxd_ckpt.coordinator import coordinator_for, on_every_rank
from nxd_engine.checkpoints.tags import open_folder

MB = 1024**2
SHM_PATH = "/dev/shm"  # where the old uploader kept its buffers
_TRANSIENT = ("SlowDown", "RequestTimeout", "InternalError", "Throttling")


class BaseCheckpointStorage:
    """Files below a folder, which may be a URL that fsspec knows. Names are relative to it.

    Args:
        dirname: the folder; it need not exist.

    Raises:
        ValueError: the scheme of the URL is not known.
        ImportError: the package for this scheme is not installed; says which.
    """

    def __init__(self, dirname: str) -> None:
        self._dirname = dirname
        self._file_system, self._root = open_folder(dirname)

    def dirname(self) -> str:
        """The folder."""
        return self._dirname

    def dir_exists(self, dirname: str) -> bool:
        """Whether there is such a folder."""
        return bool(self._file_system.isdir(self._path(dirname)))

    def file_exists(self, filename: str) -> bool:
        """Whether there is such a file."""
        return bool(self._file_system.isfile(self._path(filename)))

    def is_checkpoint_xser(self, dirname: str) -> bool:
        """Whether a checkpoint's folder holds a file for each tensor."""
        return bool(self._file_system.glob(f"{self._path(dirname)}/*/*.tensors"))

    def list_checkpoint_tags(self) -> list[str]:
        """Folders with the marker of a begun checkpoint, oldest first."""
        return self.find_subdirs_contain_path("checkpoint", 1, sort_by_mdate=True)

    def list_completed_checkpoint_tags(self) -> list[str]:
        """Folders with the marker of a complete checkpoint, oldest first."""
        return self.find_subdirs_contain_path("done", 1, sort_by_mdate=True)

    def find_subdirs_contain_path(
        self,
        pattern: str,
        search_depth: int,
        search_root: str | None = None,
        max_count: int | None = None,
        sort_by_mdate: bool = False,
    ) -> list[str]:
        """Folders that hold a file of `find_files`, one for each file."""
        found = self.find_files(pattern, search_depth + 1, search_root, max_count, sort_by_mdate)
        return [posixpath.dirname(name) for name in found]

    def find_files(
        self,
        pattern: str,
        search_depth: int,
        search_root: str | None = None,
        max_count: int | None = None,
        sort_by_mdate: bool = False,
    ) -> list[str]:
        """Names of files and folders.

        Args:
            pattern: shell pattern of their last part.
            search_depth: how many parts below `search_root` a name may have.
            search_root: a folder below this one; this one if None.
            max_count: at most so many; all if None.
            sort_by_mdate: oldest first; else by name.
        """
        top = self._path(search_root or "")
        if not self._file_system.isdir(top):
            return []
        found = self._file_system.find(top, maxdepth=search_depth, withdirs=True)
        matching = [path for path in found if fnmatch.fnmatchcase(posixpath.basename(path), pattern) and path != top]
        if sort_by_mdate:
            matching.sort(key=self._file_system.modified)
        return [posixpath.relpath(path, self._root) for path in matching[: max_count or None]]

    def save_text(self, text: str, filename: str) -> None:
        """Write a text file."""
        with self._file_system.open(self._path(filename), "w") as file:
            file.write(text)

    def save_object(self, obj: object, filename: str) -> None:
        """Write what `torch.save` makes of a value."""
        with self._file_system.open(self._path(filename), "wb") as file:
            torch.save(obj, file)

    def load_object(self, filename: str, map_location: Any = None) -> Any:
        """A value of `save_object`: containers, plain values and tensors.

        Args:
            filename: relative to the folder.
            map_location: as for `torch.load`.

        Raises:
            FileNotFoundError: there is no such file.
            pickle.UnpicklingError: the file asks for anything else, which could run code.
        """
        with self._file_system.open(self._path(filename), "rb") as file:
            return torch.load(file, map_location=map_location, weights_only=True)

    def create_dir(self, dirname: str, exist_ok: bool = True) -> None:
        """Make a folder, with those above it."""
        self._file_system.makedirs(self._path(dirname), exist_ok=exist_ok)

    def create_shared_dir(
        self, dirname: str, exist_ok: bool = True, process_group: dist.ProcessGroup | None = None
    ) -> None:
        """Make a folder for all ranks of a group, which all call this; the first makes it.

        Args:
            dirname: relative to the folder.
            exist_ok: whether it may be there.
            process_group: of the ranks; this process alone if None.
        """
        if process_group is None:
            self.create_dir(dirname, exist_ok)
            return

        def make() -> None:
            if process_group.rank() == 0:
                self.create_dir(dirname, exist_ok)

        on_every_rank(coordinator_for(process_group), f"making {dirname}", make, error_type=OSError)

    def remove_dir(self, dirname: str) -> None:
        """Remove a folder with all that is in it, if it is there."""
        if self.dir_exists(dirname):
            self._file_system.rm(self._path(dirname), recursive=True)

    def remove_file(self, filename: str) -> None:
        """Remove a file, if it is there."""
        if self.file_exists(filename):
            self._file_system.rm_file(self._path(filename))

    def remove_dirs(self, dirnames: Iterable[str]) -> None:
        """Remove folders."""
        for dirname in dirnames:
            self.remove_dir(dirname)

    def remove_files(self, filenames: Iterable[str]) -> None:
        """Remove files."""
        for filename in filenames:
            self.remove_file(filename)

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name) if name else self._root


class FilesysCheckpointStorage(BaseCheckpointStorage):
    """Files of this machine."""


class S3CheckpointStorage(BaseCheckpointStorage):
    """Objects of S3, through s3fs.

    Args:
        dirname: `s3://bucket/prefix`.
        crt_config: of the old uploader; of no effect.

    Raises:
        ImportError: s3fs is not installed.
    """

    S3_PATH_PREFIX = "s3://"

    def __init__(self, dirname: str, crt_config: dict[str, Any] | None = None) -> None:
        super().__init__(dirname)

    @staticmethod
    def parse_path(s3_path: str) -> tuple[str, str | None]:
        """Bucket and key of a URL; None for a bucket alone.

        Raises:
            ValueError: no URL of S3.
        """
        if not s3_path.startswith(S3CheckpointStorage.S3_PATH_PREFIX):
            raise ValueError(f"{s3_path!r} is no URL of S3; give s3://bucket/prefix")
        bucket, _, key = s3_path.removeprefix(S3CheckpointStorage.S3_PATH_PREFIX).partition("/")
        return bucket, key or None

    def convert_path_to_key(self, path: str) -> str:
        """The key of a file."""
        return posixpath.join(self.parse_path(self._dirname)[1] or "", path)


def create_checkpoint_storage(dirname: str, crt_config: dict[str, Any] | None = None) -> BaseCheckpointStorage:
    """The storage of a folder or URL."""
    if dirname.startswith(S3CheckpointStorage.S3_PATH_PREFIX):
        return S3CheckpointStorage(dirname, crt_config)
    return FilesysCheckpointStorage(dirname)


def is_slow_down_error(exception: BaseException) -> bool:
    """Whether an error of S3 says to try again more slowly."""
    response = getattr(exception, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return code in _TRANSIENT or any(f"<Code>{name}</Code>" in str(exception) for name in _TRANSIENT[:3])


class CheckpointIOState:
    """A script's own checkpoint in the making: its folder, its markers, and objects, written at once or behind.

    `save_checkpoint` needs none: it commits a checkpoint as a whole, which this does not.

    Args:
        async_save: write in a thread; `wait_all` waits for it.
    """

    def __init__(self, async_save: bool = False) -> None:
        self._async_save = async_save
        self._storage: BaseCheckpointStorage | None = None
        self._tag = ""
        self._items: list[tuple[Any, str]] = []
        self._executor = ThreadPoolExecutor(max_workers=1) if async_save else None
        self._writing: Future[None] | None = None

    def begin(self, checkpoint_dir: BaseCheckpointStorage, tag: str) -> None:
        """Make the folder of a checkpoint and mark it as begun, after the one before is written. Called by all ranks.

        Args:
            checkpoint_dir: holds the folders of all checkpoints.
            tag: this one's name.
        """
        self.wait_all()
        self._storage, self._tag = checkpoint_dir, tag

        def make() -> None:
            if not _rank():
                checkpoint_dir.create_dir(tag)
                checkpoint_dir.save_text("1", posixpath.join(tag, "checkpoint"))

        _together(f"beginning checkpoint {tag}", make)

    def add_save_task(self, obj: Any, filename: str) -> None:
        """Give an object to be written below the checkpoint's folder.

        Args:
            obj: for `torch.save`.
            filename: begins with the tag.

        Raises:
            ValueError: `begin` has not been called, or the name begins otherwise.
        """
        if self._storage is None or not filename.startswith(f"{self._tag}/"):
            raise ValueError(f"{filename!r} is not below the checkpoint {self._tag!r}; call begin, and name it so")
        self._items.append((obj, filename))

    def end(self, num_kept: int | None) -> None:
        """Write what was given, and mark the checkpoint as complete. Called by all ranks.

        Args:
            num_kept: of the complete ones, remove all but the newest so many; None or -1 keeps all.
        """
        self._num_kept = num_kept
        storage, items, self._items = self._storage, self._items, []
        if storage is None:
            raise ValueError("no checkpoint is begun; call begin before end")

        def write() -> None:
            for obj, filename in items:
                storage.create_dir(posixpath.dirname(filename))
                storage.save_object(obj, filename)

        if self._executor is not None:
            self._writing = self._executor.submit(write)
            return
        self._complete(write)

    def wait_all(self) -> None:
        """Wait until what is being written is complete. Called by all ranks."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._complete(writing.result)

    def _complete(self, write: Any) -> None:
        storage, tag, num_kept = self._storage, self._tag, self._num_kept
        assert storage is not None
        _together(f"writing checkpoint {tag}", write)

        def mark() -> None:
            if _rank():
                return
            storage.save_text("1", posixpath.join(tag, "done"))
            complete = storage.list_completed_checkpoint_tags()
            for old in [] if num_kept in (None, -1) else complete[: max(0, len(complete) - int(num_kept or 0))]:
                storage.remove_file(posixpath.join(old, "done"))  # first, so that it is never taken for complete
                storage.remove_dir(old)

        _together(f"completing checkpoint {tag}", mark)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _together(doing: str, act: Any) -> None:
    on_every_rank(coordinator_for(None), doing, act, error_type=OSError)
