"""Opens images of training rows: files in the data folder, data URIs and bytes, decoded to RGB.

Images are from strangers. Their size is read from the header and bounded before anything is decoded, only still
pictures of common formats are read, and nothing outside the data folder is opened. This is the only module that imports
Pillow.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
import struct
from contextlib import suppress
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from nxd_data.sources import target_stays_in

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 1 << 26
MAX_BYTES = 1 << 26  # of an encoded image
MAX_ASPECT_RATIO = 200  # processors enlarge the shorter edge, so a line of pixels would become huge
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")

_MAX_SCANS = 64  # of a progressive JPEG, each of which goes over all pixels; encoders write about ten
_MAX_TILE_PIXELS = 1 << 22  # of a TIFF, whose tiles are decoded whole
_TIFF_TILE_WIDTH, _TIFF_TILE_LENGTH = 322, 323
_DATA_URI = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_SHOWN = 60  # characters of a path or URI in messages


def read_image_file(place: str, folder: Path, name: str) -> bytes:
    """Return the content of an image file.

    Args:
        place: location of the image in the data, for messages.
        folder: the data folder, which the file must be in, also after following links.
        name: path of the file relative to the folder.

    Raises:
        ValueError: there is no such file, it is outside the folder, not a plain file, or too large.
    """
    file = folder / name
    shown = f"{place}: the image {shortened(str(file))}"
    try:
        if not target_stays_in(folder, file):
            raise ValueError(f"{shown} is outside the data folder {folder}; put the images into that folder")
        # A pipe without a writer would block.
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as stream:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise ValueError(f"{shown} is not a file; name an image file")
            if about.st_size > MAX_BYTES:
                raise ValueError(f"{shown} has {about.st_size:,} bytes; at most {MAX_BYTES:,} are allowed")
            return stream.read(MAX_BYTES + 1)
    except IsADirectoryError as error:
        raise ValueError(f"{shown} is not a file; name an image file") from error
    except OSError as error:
        raise ValueError(f"{shown} cannot be read: {error.strerror or error}; fix the path, or leave it out") from None


def image_name(place: str, data_file: Path, folder: Path, written: str) -> str:
    """Return the path of an image relative to the data folder.

    Args:
        place: location of the image in the data, for messages.
        data_file: the file with the row, whose folder the path is relative to.
        folder: the data folder.
        written: the path as the row has it.

    Raises:
        ValueError: it is a URL, or leads out of the data folder.
    """
    scheme = _SCHEME.match(written)
    if scheme is not None:
        raise ValueError(
            f"{place}: the image {shortened(written)} is a URL; training data take files in the data folder, data "
            "URIs and bytes, so download it and give its path"
        )
    if "\0" in written or not written.strip():
        raise ValueError(f"{place}: the image path {shortened(written)} is not a path; name an image file")
    name = os.path.relpath(os.path.join(data_file.parent, written), folder)
    if name.split(os.sep)[0] == os.pardir:
        raise ValueError(
            f"{place}: the image {shortened(written)} is outside the data folder {folder}; put the images into that "
            "folder"
        )
    return name


def is_data_uri(text: str) -> bool:
    """Whether a text is a data URI rather than a path or a URL."""
    return text[:5].lower() == "data:"


def data_uri_bytes(place: str, uri: str) -> bytes:
    """Return the content of a data URI.

    Raises:
        ValueError: it is too long, not of an image type, or not valid base64.
    """
    shown = f"{place}: the data URI {shortened(uri)}"
    head = _DATA_URI.match(uri[: 1 << 12])
    if head is None:
        raise ValueError(f"{shown} has no content; expected data:image/png;base64,...")
    if not head[1].lower().startswith("image/") or head[1].lower() == "image/svg+xml":
        raise ValueError(f"{shown} has the type {head[1] or 'text/plain'!r}; expected an image, such as image/png")
    if len(uri) > 2 * MAX_BYTES:
        raise ValueError(f"{shown} has {len(uri):,} characters; at most {2 * MAX_BYTES:,} are allowed")
    if ";base64" not in head[2].lower():
        return unquote_to_bytes(uri[head.end() :])
    try:
        return base64.b64decode(uri[head.end() :].encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError(f"{shown} is not valid base64: {error}; encode the image again") from None


def decode_image(place: str, content: bytes) -> Image:
    """Decode an image file's content to RGB, upright as its EXIF orientation says.

    Transparency is dropped, as transformers does.

    Raises:
        ValueError: the content is not a whole, still image of one of `FORMATS`, or it is too large.
    """
    pillow = _import_pillow(place)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{place}: the image has {len(content):,} bytes; at most {MAX_BYTES:,} are allowed")
    _check_size(place, *(_webp_size(content) or (1, 1)))  # Pillow allocates this before it reports the size
    try:
        image = pillow.open(BytesIO(content), formats=FORMATS)
    except pillow.UnidentifiedImageError:
        if not content:
            raise ValueError(f"{place}: the image is empty; fix it, or leave it out") from None
        raise ValueError(f"{place}: the image is damaged, or none of {', '.join(FORMATS)}; convert it to PNG") from None
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise ValueError(f"{place}: the image is too large: {_reason(error)}; make it smaller") from None
    except Exception as error:  # decoders raise many types for damaged files
        raise ValueError(f"{place}: the image is damaged: {_reason(error)}; fix it, or leave it out") from None
    with image:
        _check_size(place, *image.size)
        try:
            _check_form(place, image, content)
            image.load()
            return _upright_rgb(place, pillow, image)
        except _RefusedError:
            raise
        except Exception as error:  # as above
            raise ValueError(f"{place}: the image is damaged: {_reason(error)}; fix it, or leave it out") from None


def shortened(text: str) -> str:
    """Return a path or URI for a message, printable and cut in the middle if it is long."""
    shown = repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 20]}...{text[-15:]}")
    return shown[1:-1]


class _RefusedError(ValueError):
    """A form of image that is not read."""


def _check_size(place: str, width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise _RefusedError(f"{place}: the image has {width}x{height} pixels; fix it, or leave it out")
    if width * height > MAX_PIXELS:
        raise _RefusedError(
            f"{place}: the image has {width}x{height} pixels; at most {MAX_PIXELS:,} are allowed, so make it smaller"
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise _RefusedError(
            f"{place}: the image has {width}x{height} pixels; one side may be at most {MAX_ASPECT_RATIO} times the "
            "other, so crop it"
        )


def _check_form(place: str, image: Any, content: bytes) -> None:
    if image.format != "MPO" and (getattr(image, "is_animated", False) or getattr(image, "n_frames", 1) > 1):
        raise _RefusedError(f"{place}: the image is animated or has several pages; save one of them as PNG or JPEG")
    if image.format in ("JPEG", "MPO") and content.count(b"\xff\xda") > _MAX_SCANS:
        raise _RefusedError(f"{place}: the image has more than {_MAX_SCANS} scans; save it again")
    if image.format == "TIFF":
        tile = [image.tag_v2.get(tag, 1) for tag in (_TIFF_TILE_WIDTH, _TIFF_TILE_LENGTH)]
        if not all(isinstance(side, int) for side in tile) or tile[0] * tile[1] > _MAX_TILE_PIXELS:
            raise _RefusedError(f"{place}: the image has tiles of {tile[0]}x{tile[1]} pixels; save it again")
    if image.mode == "F":
        raise _RefusedError(f"{place}: the image has float pixels of an unknown range; save it with 8 bits per color")


def _upright_rgb(place: str, pillow: Any, image: Any) -> Image:
    """Return a decoded image as RGB; gray levels of 16 bits are divided by 256, where Pillow would clip them."""
    if image.mode.startswith("I"):
        image = image.convert("I").point(lambda level: level * (1 / 256)).convert("L")
    with suppress(Exception):  # many files have damaged EXIF data, and readers ignore these
        image = _import_pillow(place, "PIL.ImageOps").exif_transpose(image)
    upright: Image = image.convert("RGB")
    return upright


def _webp_size(content: bytes) -> tuple[int, int] | None:
    """Return width and height in a WebP header; None for other formats."""
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP" or len(content) < 30:
        return None
    kind = content[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(content[24:27], "little"), 1 + int.from_bytes(content[27:30], "little")
    if kind == b"VP8L":
        bits = struct.unpack_from("<I", content, 21)[0]
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", content, 26)
    return width & 0x3FFF, height & 0x3FFF


def _reason(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


def _import_pillow(place: str, name: str = "PIL.Image") -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(f"{place}: images need Pillow, which is missing: pip install 'nxd-data[vision]'") from error
