"""Images of training rows: formats, modes and orientation, and files that must not be read."""

import base64
import os
import struct
import subprocess
import sys
import tracemalloc
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from nxd_data.images import (
    MAX_BYTES,
    data_uri_bytes,
    decode_image,
    image_name,
    is_data_uri,
    read_image_file,
)
from PIL import Image

SHORT, LONG = 3, 4  # types of TIFF tags


def picture(width: int = 40, height: int = 24, *, seed: int = 0) -> Image.Image:
    """Return a picture of smooth colors, which every format keeps nearly unchanged."""
    rows, columns = np.mgrid[0:height, 0:width]
    levels = np.stack([rows * 255 // height, columns * 255 // width, (rows + columns + 40 * seed) % 256], axis=-1)
    return Image.fromarray(levels.astype(np.uint8))


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    """Return an image as a file's content."""
    stream = BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def bomb_png(width: int = 100_000, height: int = 100_000) -> bytes:
    """Return a PNG of a few bytes whose header claims many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", content) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def bomb_webp() -> bytes:
    """Return a WebP whose header claims a canvas of gigabytes."""
    frame = encoded(picture(), "WEBP", lossless=True)[12:]
    canvas = b"VP8X" + struct.pack("<IB3x", 10, 0) + (16_382).to_bytes(3, "little") * 2
    return b"RIFF" + struct.pack("<I", 4 + len(canvas) + len(frame)) + b"WEBP" + canvas + frame


def tiff(tags: dict[int, tuple[int, int]], content: bytes = b"") -> bytes:
    """Return a TIFF with one directory of tags: (type, value) by number, of which a 0xFFFF value is the content's."""
    start = 8 + 2 + 12 * len(tags) + 4
    entries = b"".join(
        struct.pack("<HHII", tag, kind, 1, start if value == 0xFFFF else value)
        for tag, (kind, value) in sorted(tags.items())
    )
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", 0) + content


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_decode_image_of_each_format_gives_its_pixels(form: str) -> None:
    decoded = decode_image("here", encoded(picture(), form))

    assert decoded.mode == "RGB"
    assert decoded.size == (40, 24)
    difference = np.abs(np.asarray(decoded).astype(int) - np.asarray(picture()).astype(int)).mean()
    assert difference < (16 if form in ("GIF", "JPEG", "WEBP") else 1e-9)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr"])
def test_decode_image_of_other_modes_gives_rgb(mode: str) -> None:
    form = {"CMYK": "TIFF", "YCbCr": "JPEG"}.get(mode, "PNG")
    image = picture().convert(mode)

    decoded = decode_image("here", encoded(image, form))

    assert decoded.mode == "RGB"
    if form != "JPEG":
        np.testing.assert_array_equal(np.asarray(decoded), np.asarray(image.convert("RGB")))


def test_decode_image_of_a_palette_with_transparency_keeps_its_colors() -> None:
    image = picture().convert("P")

    decoded = decode_image("here", encoded(image, "PNG", transparency=3))

    np.testing.assert_array_equal(np.asarray(decoded), np.asarray(image.convert("RGB")))


def test_decode_image_of_16_bits_scales_its_levels() -> None:
    levels = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)

    decoded = np.asarray(decode_image("here", encoded(Image.fromarray(levels), "PNG")))

    np.testing.assert_array_equal(decoded[..., 0], levels // 256)


def test_decode_image_turns_it_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter

    decoded = decode_image("here", encoded(picture(), "PNG", exif=exif))

    np.testing.assert_array_equal(np.asarray(decoded), np.asarray(picture().transpose(Image.Transpose.ROTATE_270)))


def test_decode_image_of_one_pixel_gives_it() -> None:
    assert decode_image("here", encoded(picture(1, 1))).size == (1, 1)


def _animated(form: str) -> bytes:
    return encoded(picture(), form, save_all=True, append_images=[picture(seed=1), picture(seed=2)], duration=50)


def _many_scans() -> bytes:
    content = encoded(picture(), "JPEG", progressive=True)
    scan = content[content.index(b"\xff\xda") : -2]
    return content[:-2] + scan * 70 + content[-2:]


def _bomb_tiff() -> bytes:
    sides = {256: (LONG, 1 << 20), 257: (LONG, 1 << 20)}
    form = {258: (SHORT, 8), 259: (SHORT, 1), 262: (SHORT, 1), 277: (SHORT, 1), 278: (LONG, 1 << 20)}
    return tiff(sides | form | {273: (LONG, 0xFFFF), 279: (LONG, 64)}, bytes(64))


def _tiff_of_tiles() -> bytes:
    sides = {256: (LONG, 16), 257: (LONG, 16), 322: (LONG, 1 << 20), 323: (LONG, 1 << 20)}
    form = {258: (SHORT, 8), 259: (SHORT, 8), 262: (SHORT, 1), 277: (SHORT, 1)}
    return tiff(sides | form | {324: (LONG, 0xFFFF), 325: (LONG, 64)}, bytes(64))


_PNG, _JPEG = encoded(picture()), encoded(picture(), "JPEG")
HOSTILE = {
    "0 bytes": (b"", "is empty"),
    "text named .png": (b"I am a picture", "none of PNG, JPEG"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", "none of PNG"),
    "broken png": (_PNG[:60] + b"\xff" * 20 + _PNG[80:], "damaged"),
    "truncated png": (_PNG[: len(_PNG) // 2], "damaged"),
    "png header alone": (_PNG[:33], "damaged"),
    "truncated jpeg": (encoded(picture(400, 300), "JPEG")[:2000], "damaged"),
    "truncated webp": (encoded(picture(), "WEBP")[:60], "(damaged|none of)"),
    "truncated gif": (encoded(picture(), "GIF")[:-200], "damaged"),
    "bomb png": (bomb_png(), "(too large|at most)"),
    "png of 80 megapixels": (bomb_png(10_000, 8_000), "10000x8000 pixels; at most"),
    "png of 100 megapixels": (bomb_png(10_000, 10_000), "(too large|at most)"),
    "png without width": (bomb_png(0, 10), "(damaged|none of|0x10)"),
    "bomb webp": (bomb_webp(), "16383x16383 pixels; at most"),
    "bomb tiff": (_bomb_tiff(), "(too large|at most)"),
    "tiff of huge tiles": (_tiff_of_tiles(), "tiles of 1048576x1048576"),
    "animated gif": (_animated("GIF"), "animated"),
    "animated webp": (_animated("WEBP"), "animated"),
    "animated png": (_animated("PNG"), "animated"),
    "tiff of pages": (_animated("TIFF"), "several pages"),
    "a line of pixels": (encoded(picture(10_000, 1)), "10000x1 pixels; one side"),
    "many scans": (_many_scans(), "scans"),
    "float tiff": (encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "float pixels"),
    "icon": (encoded(picture(32, 32), "ICO"), "none of PNG"),
    "photoshop": (b"8BPS\0\1" + bytes(6) + b"\0\3" + b"\0\1\0\0" * 2 + b"\0\x08\0\3", "none of PNG"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(/etc/passwd) (r) file", "none of PNG"),
    "too many bytes": (_JPEG + bytes(MAX_BYTES), "bytes; at most"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", HOSTILE)
def test_decode_image_of_hostile_content_is_one_line(name: str) -> None:
    content, reason = HOSTILE[name]

    with pytest.raises(ValueError, match=reason) as caught:
        decode_image("chat.jsonl, line 3", content)

    assert str(caught.value).startswith("chat.jsonl, line 3: the image ")
    assert "\n" not in str(caught.value)
    assert "row" not in str(caught.value)  # requests have none


def test_decode_image_of_hostile_content_takes_little_memory(tmp_path: Path) -> None:
    for number, (content, _) in enumerate(HOSTILE.values()):
        if len(content) < MAX_BYTES:
            (tmp_path / f"{number}").write_bytes(content)
    program = (
        "import resource, sys, warnings; from pathlib import Path; from PIL import Image\n"
        "from nxd_data.images import decode_image\n"
        "warnings.simplefilter('ignore')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for file in Path(sys.argv[1]).iterdir():\n"
        "    try: decode_image('here', file.read_bytes())\n"
        "    except ValueError: pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)

    assert int(ran.stdout) < 32 << 10  # KiB


def test_decode_image_takes_less_than_ten_times_its_pixels() -> None:
    content = encoded(picture(3000, 2000).convert("CMYK"), "TIFF")
    tracemalloc.start()
    try:
        decode_image("here", content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 10 * 3 * 3000 * 2000


def test_read_image_file_in_the_folder_gives_its_content(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(_PNG)
    (tmp_path / "link.png").symlink_to("pictures/a.png")

    assert read_image_file("here", tmp_path, "pictures/a.png") == _PNG
    assert read_image_file("here", tmp_path, "link.png") == _PNG


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.png", "cannot be read"),
        ("folder.png", "is not a file"),
        ("pipe.png", "is not a file"),
        ("out.png", "outside the data folder"),
        ("inside/out.png", "outside the data folder"),
        ("loop.png", "(cannot be read|outside)"),
        ("a" * 5000, "cannot be read"),
        ("huge.png", "bytes; at most"),
    ],
)
def test_read_image_file_that_is_no_plain_file_inside_is_one_line(tmp_path: Path, name: str, reason: str) -> None:
    folder, outside = tmp_path / "data", tmp_path / "outside"
    for it in (folder / "folder.png", outside):
        it.mkdir(parents=True)
    (outside / "out.png").write_bytes(_PNG)
    (folder / "out.png").symlink_to(outside / "out.png")
    (folder / "inside").symlink_to(outside)
    (folder / "loop.png").symlink_to("loop.png")
    os.mkfifo(folder / "pipe.png")
    with (folder / "huge.png").open("wb") as stream:
        stream.truncate(MAX_BYTES + 1)

    with pytest.raises(ValueError, match=reason) as caught:
        read_image_file("chat.jsonl, line 3", folder, name)

    assert str(caught.value).startswith("chat.jsonl, line 3: the image ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_image_name_is_relative_to_the_file_of_the_row(tmp_path: Path) -> None:
    file = tmp_path / "part" / "chat.jsonl"

    assert image_name("here", file, tmp_path, "a.png") == os.path.join("part", "a.png")
    assert image_name("here", file, tmp_path, "../pictures/a.png") == os.path.join("pictures", "a.png")
    assert image_name("here", file, tmp_path, str(tmp_path / "a.png")) == "a.png"


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("../a.png", "outside the data folder"),
        ("a/../../a.png", "outside the data folder"),
        ("/etc/passwd", "outside the data folder"),
        ("http://example.com/a.png", "is a URL"),
        ("https://example.com/a.png", "is a URL"),
        ("file:///etc/passwd", "is a URL"),
        ("s3://bucket/a.png", "is a URL"),
        ("a\0.png", "is not a path"),
        ("", "is not a path"),
    ],
)
def test_image_name_that_leads_out_is_one_line(tmp_path: Path, written: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        image_name("chat.jsonl, line 3", tmp_path / "chat.jsonl", tmp_path, written)

    assert str(caught.value).startswith("chat.jsonl, line 3: the image ")
    assert "\n" not in str(caught.value)


def test_data_uri_bytes_give_its_content() -> None:
    uri = f"data:image/png;base64,{base64.b64encode(_PNG).decode()}"

    assert is_data_uri(uri)
    assert data_uri_bytes("here", uri) == _PNG
    assert data_uri_bytes("here", "data:image/png,%89PNG") == b"\x89PNG"


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("data:text/html;base64,PGI+", "type 'text/html'"),
        ("data:image/svg+xml;base64,PGI+", "type 'image/svg"),
        ("data:;base64,PGI+", "type 'text/plain'"),
        ("data:image/png;base64", "no content"),
        ("data:image/png;base64,@@@@", "not valid base64"),
        ("data:image/png;base64,abc", "not valid base64"),
        ("data:image/png;base64,é", "not valid base64"),
        ("data:image/png;base64," + "A" * (2 * MAX_BYTES), "characters; at most"),
    ],
    ids=str.__len__,
)
def test_data_uri_bytes_of_another_form_are_one_line(uri: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        data_uri_bytes("chat.jsonl, line 3", uri)

    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
