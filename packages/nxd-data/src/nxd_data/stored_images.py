"""The images of tokenized conversations: read while they are tokenized, listed in the cache entry, opened for training.

An image by path stays where it is: the entry has its path in the data folder and a digest of its content, which is
checked each time it is read. Content from rows (data URIs, bytes) is copied into the entry, once for equal images.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nxd_data.content_parts import ImageSource
from nxd_data.images import data_uri_bytes, decode_image, image_name, is_data_uri, read_image_file, shortened

if TYPE_CHECKING:
    from PIL.Image import Image

LIST_FILE = "images.jsonl"
CONTENTS_FILE = "images.bin"
PLACES_FILE = "image_places.bin"


class ImageContent(NamedTuple):
    """The content of an image's file."""

    content: bytes | None  # None if it is no longer needed
    num_bytes: int
    digest: str  # of the content
    name: str | None  # path in the data folder; None for content in the row


class ImageFiles:
    """Reads the images of the rows in a file.

    Args:
        data_file: the file with the rows, whose folder paths are relative to.
        folder: the data folder, which all images must be in; None if images cannot be given by path.
    """

    def __init__(self, data_file: Path, folder: Path | None) -> None:
        self._data_file, self._folder = data_file, folder

    def read(self, source: ImageSource) -> ImageContent:
        """Read an image; raises ValueError if it cannot be read, or must not be."""
        place, written, name, content = source.place, source.written, None, source.content
        if written is not None and is_data_uri(written):
            content = data_uri_bytes(place, written)
        elif written is not None:
            if self._folder is None:
                raise ValueError(
                    f"{place}: the image has a path but no content, which data.dataset does not read; save the "
                    "dataset with the contents of its images, or use data.path"
                )
            name = image_name(place, self._data_file, self._folder, written)
            content = read_image_file(place, self._folder, name)
        assert content is not None
        return ImageContent(content, len(content), hashlib.sha256(content).hexdigest(), name)


class EncodedImage(NamedTuple):
    """An image of a tokenized conversation."""

    source: ImageContent
    size: tuple[int, int]  # width and height in pixels, upright
    start: int  # first of its tokens in the conversation
    end: int  # end of its tokens


@dataclass(frozen=True, kw_only=True)
class StoredImage:
    """A distinct image of a cache entry."""

    digest: str  # SHA-256 of its content
    width: int
    height: int
    num_bytes: int
    name: str | None = None  # path in the data folder; None if the content is in the entry
    offset: int = 0  # of the content in the entry
    modified: int = 0  # time of the file's last change, in nanoseconds

    @property
    def label(self) -> str:
        """Its name and size, such as "image photo.png 640x480"."""
        name = "" if self.name is None else f" {shortened(os.path.basename(self.name))}"
        return f"image{name} {self.width}x{self.height}"


class ImageWriter:
    """Writes the images of a cache entry; `finish` must be called at the end.

    Args:
        folder: the entry's folder.
        data_folder: the data folder.
    """

    def __init__(self, folder: Path, data_folder: Path | None) -> None:
        self._folder, self._data_folder = folder, data_folder
        self._numbers: dict[tuple[str, str | None], int] = {}  # of distinct images
        self._stored: list[StoredImage] = []
        self._places: list[tuple[int, int, int]] = []
        self._size = 0  # of the contents

    def add(self, image: EncodedImage, conversation_start: int) -> None:
        """Add the next image, of a conversation that starts at a token of the entry."""
        key = (image.source.digest, image.source.name)
        if key not in self._numbers:
            self._numbers[key] = len(self._stored)
            self._stored.append(self._store(image))
        self._places.append((conversation_start + image.start, conversation_start + image.end, self._numbers[key]))

    def _store(self, image: EncodedImage) -> StoredImage:
        content, num_bytes, digest, name = image.source
        width, height = image.size
        stored = StoredImage(digest=digest, width=width, height=height, num_bytes=num_bytes, name=name)
        if name is not None:
            assert self._data_folder is not None
            modified = (self._data_folder / name).stat().st_mtime_ns
            return StoredImage(**{**asdict(stored), "modified": modified})
        assert content is not None
        with (self._folder / CONTENTS_FILE).open("ab") as stream:
            stream.write(content)
        self._size += num_bytes
        return StoredImage(**{**asdict(stored), "offset": self._size - num_bytes})

    def finish(self) -> None:
        """Write the list of images, unless there are none."""
        if self._places:
            np.asarray(self._places, dtype=np.int64).tofile(self._folder / PLACES_FILE)
            lines = [json.dumps(asdict(image)) + "\n" for image in self._stored]
            (self._folder / LIST_FILE).write_text("".join(lines), encoding="utf-8")


@dataclass(frozen=True)
class StoredImages:
    """The images of a cache entry, in the order of their tokens."""

    entry: Path  # the entry's folder
    data_folder: Path | None  # folder of images by path
    starts: NDArray[np.int64]  # `[images]` first token of each
    ends: NDArray[np.int64]  # `[images]` end of the tokens of each
    numbers: NDArray[np.int64]  # `[images]` number of each among the distinct ones
    distinct: Sequence[StoredImage]

    def within(self, start: int, end: int) -> range:
        """Return the images whose tokens are all among those from `start` to `end`."""
        first = int(np.searchsorted(self.starts, start))
        return range(first, max(first, int(np.searchsorted(self.ends, end, side="right"))))

    def about(self, image: int) -> StoredImage:
        """Return what is known about an image without opening it."""
        return self.distinct[int(self.numbers[image])]

    def open(self, image: int) -> Image:
        """Decode an image to RGB.

        Raises:
            ValueError: its file is gone, or has changed since it was tokenized.
        """
        about = self.about(image)
        if about.name is None:
            place = f"image {image} in {self.entry}"
            with (self.entry / CONTENTS_FILE).open("rb") as stream:
                stream.seek(about.offset)
                content = stream.read(about.num_bytes)
            advice = f"delete {self.entry} to rebuild it"
        else:
            assert self.data_folder is not None
            place, advice = str(self.data_folder / about.name), "start again to tokenize it"
            content = read_image_file(place, self.data_folder, about.name)
        if hashlib.sha256(content).hexdigest() != about.digest:
            raise ValueError(f"{place}: the image has changed since it was tokenized; {advice}")
        return decode_image(place, content)


def open_images(entry: Path, data_folder: Path | None) -> StoredImages | None:
    """Open the images of a cache entry; None if it has none.

    Raises:
        ValueError: the entry is damaged, or there is no folder for images by path.
    """
    if not (entry / PLACES_FILE).is_file():
        return None
    places = np.fromfile(entry / PLACES_FILE, dtype=np.int64).reshape(-1, 3)
    distinct = _listed(entry)
    if len(places) and (places[:, 2].min() < 0 or places[:, 2].max() >= len(distinct)):
        raise ValueError(f"{LIST_FILE} lists {len(distinct)} images, fewer than {PLACES_FILE} has")
    if data_folder is None and any(image.name is not None for image in distinct):
        raise ValueError("its images are in a data folder, which is not known")
    starts, ends, numbers = np.ascontiguousarray(places.T)
    return StoredImages(entry, data_folder, starts, ends, numbers, distinct)


def _listed(entry: Path) -> list[StoredImage]:
    with (entry / LIST_FILE).open(encoding="utf-8") as stream:
        return [StoredImage(**json.loads(line)) for line in stream]


def changed_images(entry: Path, data_folder: Path | None) -> dict[str, str | None]:
    """Return the digests of image files that have changed since an entry was written, by name; None if one is gone.

    A file of the same size and time of change is taken as unchanged; `StoredImages.open` notices if it is not.
    """
    changed: dict[str, str | None] = {}
    if data_folder is None or not (entry / LIST_FILE).is_file():
        return changed
    for image in _listed(entry):
        if image.name is None:
            continue
        try:
            about = os.stat(data_folder / image.name)
            if (about.st_size, about.st_mtime_ns) == (image.num_bytes, image.modified):
                continue
            digest = hashlib.sha256(read_image_file(image.name, data_folder, image.name)).hexdigest()
        except (OSError, ValueError):
            changed[image.name] = None
            continue
        if digest != image.digest:
            changed[image.name] = digest
    return changed
