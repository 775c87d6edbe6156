"""A checkpoint root in an object store, through the fsspec file system of its URL: `memory://`, `s3://`, `gs://`, ...

    <root>/<tag>/manifest.json, <root>/<tag>/data/..., <root>/<tag>/extra/...
    <root>/.pins/<tag>    marks this tag as pinned
    <root>/.holds/<save_id>   the data files of other checkpoints that a save in progress is about to reference
    <root>/LATEST         the tag that was committed last, for people; nothing here reads it

Object stores have no rename: files are written under their final keys, and the put of the manifest turns them into a
checkpoint (`FsspecSave`). Only this file of the package imports fsspec.
"""

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import fsspec

from nxd_ckpt.arguments import is_tag
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.manifest import FILE_FOLDERS, MANIFEST_NAME, MAX_MANIFEST_BYTES, file_names_in, is_file_name
from nxd_ckpt.stores.fsspec_save import FsspecSave, os_errors, protocols_of
from nxd_ckpt.stores.interface import Capabilities, Garbage, ReadRange
from nxd_ckpt.stores.manifests import by_place, files_in_use, places_in, read_head

_PINS_FOLDER = ".pins"
_HOLDS_FOLDER = ".holds"
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}

# fsspec interprets some of these as patterns or options, and object stores advise against the others.
_UNSAFE_IN_KEYS = re.compile(r"[*?\[\]{}#%\"<>|^~`]|::")

_REQUEST_BYTES = 16 * 2**20
_PARALLEL_REQUESTS = 8
_PARALLEL_HEADS = 64
_MAX_GAP = 64 * 2**10  # reading a gap this large is faster than another request


class FsspecStore:
    """A folder in an object store. Objects of this class can be pickled.

    Raises:
        ValueError: fsspec has no file system for this scheme.
        ImportError: the package for this scheme is not installed.
    """

    def __init__(self, url: str) -> None:
        self.location = url.rstrip("/")
        scheme = url.partition("://")[0]
        try:
            self.fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            remedy = (
                f"pip install 'nxd-ckpt[{_EXTRAS[scheme]}]'"
                if scheme in _EXTRAS
                else "install the package that it names"
            )
            raise ImportError(f"path={url!r} cannot be opened: {error}; {remedy}") from error

    @property
    def capabilities(self) -> Capabilities:
        """See `Store.capabilities`."""
        return Capabilities(other_processes="memory" not in protocols_of(self.fs), other_files=True, remote=True)

    def where(self, tag: str, file: str = MANIFEST_NAME) -> str:
        """See `Store.where`."""
        return f"{self.location}/{tag}/{file}"

    def key(self, tag: str, file: str = MANIFEST_NAME) -> str:
        """Return the key of a file in the file system.

        Raises:
            ValueError: the tag is not allowed in an object store.
        """
        if _UNSAFE_IN_KEYS.search(f"{tag}/{file}"):
            raise ValueError(
                f'tag {tag!r} is not allowed in an object store: leave out * ? [ ] {{ }} # % " < > | ^ ~ ` ::'
            )
        return f"{self._root}/{tag}/{file}"

    def tags(self) -> list[str]:
        """See `Store.tags`."""
        return [tag for tag in self._folders() if self._has_manifest(tag)]

    def beginnings(self, num_bytes: int) -> Iterator[tuple[str, bytes, int | None]]:
        """See `Store.beginnings`: several at a time."""
        tags = self._folders()
        for first in range(0, len(tags), _PARALLEL_HEADS):
            group = tags[first : first + _PARALLEL_HEADS]
            keys = [self.key(tag) for tag in group]
            with os_errors():
                contents = self.fs.cat_ranges(keys, [0] * len(keys), [num_bytes] * len(keys), on_error="return")
            for tag, content in zip(group, contents, strict=True):
                if not isinstance(content, FileNotFoundError):
                    yield tag, b"" if isinstance(content, Exception) else bytes(content), None

    def read_manifest(self, tag: str) -> bytes:
        """See `Store.read_manifest`."""
        if self.file_size(tag, MANIFEST_NAME) > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{self.where(tag)} is larger than a manifest can be ({MAX_MANIFEST_BYTES} bytes)")
        with os_errors():
            content: bytes = self.fs.cat_file(self.key(tag))
        return content

    def file_size(self, tag: str, file: str) -> int:
        """See `Store.file_size`."""
        with os_errors():
            return int(self.fs.info(self.key(tag, file))["size"])

    def read_into(self, tag: str, file: str, ranges: Sequence[ReadRange]) -> None:
        """See `Store.read_into`: by ranges, several at a time."""
        key, spans = self.key(tag, file), list(_spans(ranges))
        for first in range(0, len(spans), _PARALLEL_REQUESTS):
            group = spans[first : first + _PARALLEL_REQUESTS]
            starts, ends = [span[0].offset for span in group], [_end(span[-1]) for span in group]
            with os_errors():
                contents = self.fs.cat_ranges([key] * len(group), starts, ends, on_error="return")
                if failed := [content for content in contents if isinstance(content, Exception)]:
                    raise failed[0]
            for span, start, end, content in zip(group, starts, ends, contents, strict=True):
                if len(content) < end - start:
                    missing = end - start - len(content)
                    raise CheckpointError(f"the file ends at byte {start + len(content)}, {missing} bytes early")
                if len(content) > end - start:  # these may be of another place in the file
                    raise CheckpointError(
                        f"the store returned more bytes than requested: {len(content)} instead of {end - start}; it "
                        "must honor byte ranges"
                    )
                for piece in span:
                    piece.destination[:] = memoryview(content)[piece.offset - start : _end(piece) - start]

    def delete(self, tag: str) -> None:
        """See `Store.delete`: removes the manifest, then the files it listed that are not referenced elsewhere."""
        places = places_in(self, tag)
        if places is None:
            places = dict.fromkeys(self.files(tag), tag)
        with os_errors():
            self.fs.rm_file(self.key(tag))
        self.remove_unused(places)

    def remove_unused(self, places: Mapping[str, str]) -> None:
        """Remove the files that are not referenced.

        Args:
            places: the tag under which each file is stored, by file.
        """
        for place, files in by_place(places.keys() - files_in_use(self, places), places).items():
            self.remove_files(place, files)

    def held(self) -> set[str]:
        """See `Store.held`."""
        found: set[str] = set()
        for name in self._names(f"{self._root}/{_HOLDS_FOLDER}"):
            with os_errors(), contextlib.suppress(FileNotFoundError):
                found |= file_names_in(self.fs.cat_file(f"{self._root}/{_HOLDS_FOLDER}/{name}"))
        return found

    def set_held(self, save_id: str, files: Collection[str]) -> None:
        """Record the data files that a save holds; without files, remove the record."""
        key = f"{self._root}/{_HOLDS_FOLDER}/{save_id}"
        with os_errors():
            if files:
                self.fs.pipe_file(key, "\n".join(sorted(files)).encode())
            else:
                with contextlib.suppress(FileNotFoundError):
                    self.fs.rm_file(key)

    def begin_save(self, tag: str, save_id: str, *, overwrite: bool) -> "FsspecSave":
        """See `Store.begin_save`."""
        return FsspecSave(self, tag, save_id, overwrite=overwrite)

    def pinned(self) -> set[str]:
        """See `Store.pinned`."""
        return set(self._names(f"{self._root}/{_PINS_FOLDER}"))

    def set_pinned(self, tag: str, *, to: bool) -> None:
        """See `Store.set_pinned`."""
        pin = self.key(_PINS_FOLDER, tag)
        with os_errors():
            if to:
                self.fs.pipe_file(pin, b"")
            else:
                with contextlib.suppress(FileNotFoundError):
                    self.fs.rm_file(pin)

    def garbage(self, *, dead_after: float, delete: bool) -> list[Garbage]:
        """See `Store.garbage`: files that no manifest lists and that are older than `dead_after`."""
        found = self._dead_holds(dead_after=dead_after, delete=delete)
        for tag in self._folders():
            files = self.files(tag)  # before reading the manifest, which may appear in the meantime
            unknown = self._unknown(tag, files)
            # Twice: a save may take over files from a checkpoint that is deleted in the meantime.
            places = dict.fromkeys(unknown, tag)
            used = files_in_use(self, places) | files_in_use(self, places)
            dead = [file for file in unknown if file not in used and self._is_older(tag, file, dead_after)]
            found += [Garbage(self.where(tag, file), files[file]) for file in dead]
            if delete:
                self.remove_files(tag, dead)
        return found

    def _dead_holds(self, *, dead_after: float, delete: bool) -> list[Garbage]:
        found = []
        for save_id in self._names(f"{self._root}/{_HOLDS_FOLDER}"):
            with contextlib.suppress(FileNotFoundError):
                if self._is_older(_HOLDS_FOLDER, save_id, dead_after):
                    found.append(Garbage(self.where(_HOLDS_FOLDER, save_id), self.file_size(_HOLDS_FOLDER, save_id)))
                    if delete:
                        self.set_held(save_id, ())
        return found

    def files(self, tag: str) -> dict[str, int]:
        """Return names and sizes of all files under a tag that this package could have written, complete or not."""
        found = {}
        for folder in FILE_FOLDERS:
            with os_errors(), contextlib.suppress(FileNotFoundError):
                for entry in self.fs.ls(self.key(tag, folder), detail=True):
                    found[f"{folder}/{_last_part(entry['name'])}"] = int(entry["size"] or 0)
        return {file: size for file, size in sorted(found.items()) if is_file_name(file)}

    def remove_files(self, tag: str, files: Collection[str]) -> None:
        """Remove files; ones that no longer exist are ignored."""
        doomed = [self.key(tag, file) for file in self.files(tag) if file in files]
        if doomed:
            with os_errors(), contextlib.suppress(FileNotFoundError):
                self.fs.rm(doomed)

    def note_latest(self, tag: str) -> None:
        """Write the hint `LATEST`."""
        with os_errors():
            self.fs.pipe_file(f"{self._root}/LATEST", f"{tag}\n".encode())

    def _folders(self) -> list[str]:
        return [name for name in self._names(self._root) if is_tag(name) and not _UNSAFE_IN_KEYS.search(name)]

    def _names(self, folder: str) -> list[str]:
        with os_errors():
            try:
                return sorted({_last_part(name) for name in self.fs.ls(folder, detail=False)})
            except FileNotFoundError:
                return []

    def _has_manifest(self, tag: str) -> bool:
        try:
            self.file_size(tag, MANIFEST_NAME)
        except FileNotFoundError:
            return False
        return True

    def _unknown(self, tag: str, files: Collection[str]) -> list[str]:
        """Return the files that the manifest does not list; an empty list if the manifest is damaged."""
        try:
            known = read_head(self, tag).files
        except FileNotFoundError:
            return list(files)
        except CheckpointError:
            return []
        return [file for file in files if file not in known]

    def _is_older(self, tag: str, file: str, seconds: float) -> bool:
        with os_errors():
            changed: datetime = self.fs.modified(self.key(tag, file))
        return datetime.now(UTC) - changed.astimezone(UTC) >= timedelta(seconds=seconds)


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def _end(piece: ReadRange) -> int:
    return piece.offset + piece.destination.nbytes


def _spans(ranges: Sequence[ReadRange]) -> Iterator[list[ReadRange]]:
    """Group ranges by request, splitting those that are too large for one."""
    span: list[ReadRange] = []
    for piece in ranges:
        for start in range(0, piece.destination.nbytes, _REQUEST_BYTES):
            part = ReadRange(piece.offset + start, piece.destination[start : start + _REQUEST_BYTES])
            if span and (part.offset - _end(span[-1]) > _MAX_GAP or _end(part) - span[0].offset > _REQUEST_BYTES):
                yield span
                span = []
            span.append(part)
    if span:
        yield span
