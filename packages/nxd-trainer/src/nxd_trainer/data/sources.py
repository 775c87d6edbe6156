"""Finds the files of a corpus, tells text from rows, and reads text, always in the same order.

Text is UTF-8 without NUL bytes; files that are not text are skipped. Files of rows (JSONL, parquet, ...) are never
taken for text; `tables.py` reads them. This module does not know about tokens.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst")
TABLE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
PIECE_BYTES = 1 << 22
INSTALLED_PACKAGES = ("site-packages", "dist-packages")
STANDARD_LIBRARY_TESTS = ("test", "tests", "idle_test")
NAMED_LEFT_OUT = 5  # suffixes that the line about files left out names
_KEYS_OF_ROWS = "set data.column to the column with their text, or data.chat=true for conversations"


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file that is read."""

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
        path: a text file (of any suffix but those of rows) or a folder; None stands for the `.py` files of the
            running Python's standard library.
        suffixes: suffixes of the files taken from a folder.
        include_tests: take the standard library's own tests, too.

    Raises:
        ValueError: nothing at the path, or no such file in the folder; or rows, which are not to be trained on as text.
    """
    rows = [suffix for suffix in suffixes if suffix in TABLE_SUFFIXES]
    if rows:
        raise ValueError(f"data.suffixes={','.join(rows)} would read rows as text; {_KEYS_OF_ROWS}")
    if path is None:
        folder = Path(sysconfig.get_path("stdlib"))
        suffixes = (".py",)
        excluded = {*INSTALLED_PACKAGES, *(() if include_tests else STANDARD_LIBRARY_TESTS)}
    else:
        folder = Path(path)
        excluded = set()
    if folder.is_file():
        _refuse_rows(folder)
        return [(folder.name, folder)]
    if not folder.is_dir():
        raise ValueError(f"data.path={folder} does not exist; give a text file or a folder of them")
    files = sorted(_walk(folder, tuple(suffixes), {"__pycache__", *excluded}))
    if not files:
        advice = "set data.path to a folder of text" if path is None else "set data.suffixes to those it has"
        if any(_walk(folder, TABLE_SUFFIXES, {"__pycache__"})):
            advice = f"it has rows: {_KEYS_OF_ROWS}"
        raise ValueError(f"{folder} holds no file that ends in {', '.join(suffixes)}; {advice}")
    return files


def _refuse_rows(file: Path) -> None:
    """Raise ValueError for a file of rows, by its name or by its first line."""
    if file.suffix in TABLE_SUFFIXES:
        raise ValueError(f"data.path={file} holds rows, which are not text; {_KEYS_OF_ROWS}")
    with file.open("rb") as stream:
        first_line = stream.readline(PIECE_BYTES)
    try:
        holds_rows = isinstance(json.loads(first_line), dict)
    except (ValueError, RecursionError):
        return
    if holds_rows:
        raise ValueError(f"data.path={file} begins with a JSON object; name it .jsonl, and {_KEYS_OF_ROWS}")


def find_tables(path: str | Path | None, *, suffixes: Sequence[str] = TABLE_SUFFIXES) -> list[tuple[str, Path]]:
    """The files of rows of a corpus, as sorted pairs of name below its folder and path.

    Of a folder that `datasets.Dataset.save_to_disk` wrote they are the files that it lists. Hidden files and folders
    are left out.

    Args:
        path: a file or a folder.
        suffixes: suffixes of the files taken from a folder.

    Raises:
        ValueError: nothing at the path, no such file in the folder, or several splits, of which one must be named.
    """
    if path is None:
        raise ValueError("data.column and data.chat need data.path, a file of rows or a folder of them")
    folder = Path(path)
    unknown = [suffix for suffix in suffixes if suffix not in TABLE_SUFFIXES]
    if unknown:
        raise ValueError(
            f"data.suffixes={','.join(unknown)}: rows are read from {', '.join(TABLE_SUFFIXES)}; leave others out"
        )
    if folder.is_file():
        if folder.suffix not in TABLE_SUFFIXES:
            raise ValueError(
                f"data.path={folder} has no rows, which end in {', '.join(TABLE_SUFFIXES)}; leave data.column and "
                "data.chat out to read it as text"
            )
        return [(folder.name, folder)]
    if not folder.is_dir():
        raise ValueError(f"data.path={folder} does not exist; give a file of rows or a folder of them")
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(state.parent.name for state in folder.glob("*/state.json"))
        raise ValueError(f"data.path={folder} holds the splits {', '.join(splits)}; name the folder of one")
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return _files_of_saved_dataset(folder)
    files = sorted(_walk(folder, tuple(suffixes), {"__pycache__"}))
    if not files:
        raise ValueError(
            f"{folder} holds no file that ends in {', '.join(suffixes)}; to read text, unset data.column and data.chat"
        )
    return files


def _files_of_saved_dataset(folder: Path) -> list[tuple[str, Path]]:
    """Those that its `state.json` lists: others beside them are caches of derived data."""
    try:
        entries = json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]
        names = [Path(entry["filename"]).name for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / 'state.json'} lists no files of a data set; save the data set again") from error
    return [(name, folder / name) for name in names]


def files_left_out(path: str | Path | None, suffixes: Sequence[str] | None, *, takes_rows: bool) -> str | None:
    """One line about the visible files of a folder that are not taken, with the keys that would take them.

    Args:
        path: as `find_text_files` and `find_tables` take it.
        suffixes: of the files taken; None: those of text, or of rows.
        takes_rows: whether rows are taken, not text.

    Returns:
        None where nothing is left out, or the path is no folder of files to choose from.
    """
    if path is None or Path(path).is_file() or (Path(path) / "state.json").is_file():
        return None
    taken = tuple(suffixes or (TABLE_SUFFIXES if takes_rows else TEXT_SUFFIXES))
    names = [name for name, _ in _walk(Path(path), ("",), {"__pycache__"}) if not name.endswith(taken)]
    left = Counter(Path(name).suffix for name in names).most_common()
    if not left:
        return None
    named = [f"{count} {suffix or 'without suffix'}{_key_of(suffix, takes_rows)}" for suffix, count in left]
    further = [f"{len(left) - NAMED_LEFT_OUT} more kinds"] if len(left) > NAMED_LEFT_OUT else []
    return f"left out of data.path: {', '.join(named[:NAMED_LEFT_OUT] + further)}"


def _key_of(suffix: str, takes_rows: bool) -> str:
    """What would take files of a suffix, in brackets."""
    if suffix in TABLE_SUFFIXES:
        return " (data.suffixes takes them)" if takes_rows else " (data.column or data.chat takes them)"
    if takes_rows:
        return ""  # rows and text are not read together
    return " (data.suffixes takes them)" if suffix else ""


def _walk(folder: Path, suffixes: tuple[str, ...], excluded: set[str]) -> Iterator[tuple[str, Path]]:
    for parent, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if name not in excluded and not name.startswith(".")]
        for name in names:
            if name.endswith(suffixes) and not name.startswith("."):
                file = Path(parent, name)
                yield file.relative_to(folder).as_posix(), file


def scan_text_files(files: Iterable[tuple[str, Path]]) -> tuple[list[SourceFile], Counter[str]]:
    """Read each file once for its digest; what is empty, unreadable or not text is counted by reason."""
    readable: list[SourceFile] = []
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


def scan_tables(files: Iterable[tuple[str, Path]]) -> list[SourceFile]:
    """Read each file of rows once for its digest.

    Raises:
        ValueError: one cannot be read.
    """
    scanned = []
    for name, path in files:
        try:
            _check_is_file(path)
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}; mend it, or take it out of data.path") from error
        scanned.append(SourceFile(path=path, name=name, num_bytes=path.stat().st_size, digest=digest))
    return scanned


def _check_is_file(path: Path) -> None:
    # Only files: to open a pipe is to wait for whoever writes to it, and a device need not end.
    if not path.is_file():
        raise OSError(f"{path} is no file")


def _scan(name: str, path: Path) -> SourceFile:
    _check_is_file(path)
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
    return SourceFile(path=path, name=name, num_bytes=num_bytes, digest=digest.hexdigest())


def read_pieces(path: Path) -> Iterator[str]:
    """The text of a file in pieces of a few million characters that end at line ends."""
    with path.open(encoding="utf-8", newline="") as stream:
        while piece := stream.read(PIECE_BYTES):
            yield piece + stream.readline()
