"""Finds the text files of a corpus and reads them, always in the same order, skipping files that are not text.

Text is UTF-8 without NUL bytes. This module does not know about tokens.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst")
PIECE_BYTES = 1 << 22
INSTALLED_PACKAGES = ("site-packages", "dist-packages")
STANDARD_LIBRARY_TESTS = ("test", "tests", "idle_test")


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """One readable text file."""

    path: Path
    name: str  # its path below the corpus's folder, with forward slashes
    num_bytes: int
    digest: str  # of its content


def find_text_files(
    path: str | Path | None, *, suffixes: Sequence[str] = TEXT_SUFFIXES, include_tests: bool = False
) -> list[tuple[str, Path]]:
    """The files of a corpus, as sorted pairs of name below its folder and path.

    Hidden files and folders are left out.

    Args:
        path: a text file (taken whatever its suffix) or a folder; None stands for the `.py` files of the
            running Python's standard library.
        suffixes: suffixes of the files taken from a folder.
        include_tests: take the standard library's own tests, too.

    Raises:
        ValueError: nothing at the path, or no such file in the folder.
    """
    if path is None:
        folder = Path(sysconfig.get_path("stdlib"))
        suffixes = (".py",)
        excluded = {*INSTALLED_PACKAGES, *(() if include_tests else STANDARD_LIBRARY_TESTS)}
    else:
        folder = Path(path)
        excluded = set()
    if folder.is_file():
        return [(folder.name, folder)]
    if not folder.is_dir():
        raise ValueError(f"data.path={folder} does not exist; give a text file or a folder of them")
    files = sorted(_walk(folder, tuple(suffixes), {"__pycache__", *excluded}))
    if not files:
        advice = "set data.path to a folder of text" if path is None else "set data.suffixes to those it has"
        raise ValueError(f"{folder} holds no file that ends in {', '.join(suffixes)}; {advice}")
    return files


def _walk(folder: Path, suffixes: tuple[str, ...], excluded: set[str]) -> Iterator[tuple[str, Path]]:
    for parent, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if name not in excluded and not name.startswith(".")]
        for name in names:
            if name.endswith(suffixes) and not name.startswith("."):
                file = Path(parent, name)
                yield file.relative_to(folder).as_posix(), file


def scan_text_files(files: Iterable[tuple[str, Path]]) -> tuple[list[TextFile], Counter[str]]:
    """Read each file once for its digest; what is empty, unreadable or not text is counted by reason."""
    readable: list[TextFile] = []
    skipped: Counter[str] = Counter()
    for name, path in files:
        try:
            text_file = _scan(name, path)
        except UnicodeDecodeError:
            skipped["binary or not UTF-8"] += 1
        except OSError:
            skipped["unreadable"] += 1
        else:
            if text_file.num_bytes:
                readable.append(text_file)
            else:
                skipped["empty"] += 1
    return readable, skipped


def _scan(name: str, path: Path) -> TextFile:
    # Only files: to open a pipe is to wait for whoever writes to it, and a device need not end.
    if not path.is_file():
        raise OSError(f"{path} is no file")
    digest = hashlib.sha256()
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_bytes = 0
    with path.open("rb") as stream:
        while piece := stream.read(PIECE_BYTES):
            num_bytes += len(piece)
            digest.update(piece)
            decoder.decode(piece)
            if b"\0" in piece:
                raise UnicodeDecodeError("utf-8", piece, 0, 1, "NUL byte")
    decoder.decode(b"", final=True)
    return TextFile(path=path, name=name, num_bytes=num_bytes, digest=digest.hexdigest())


def read_pieces(path: Path) -> Iterator[str]:
    """The text of a file in pieces of a few million characters that end at line ends."""
    with path.open(encoding="utf-8", newline="") as stream:
        while piece := stream.read(PIECE_BYTES):
            yield piece + stream.readline()
