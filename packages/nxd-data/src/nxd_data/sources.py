"""Finds the files of a corpus, distinguishes text, rows and tokens, and reads text, always in the same order.

Text is UTF-8 without NUL bytes; other files are skipped. Files with rows (JSONL, parquet, ...) and with tokens (.npy,
.bin) are never read as text; `tables.py` and `pretokenized.py` read them. Symbolic links out of a folder are skipped,
so that an untrusted folder cannot name other files of this machine.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst")
TABLE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
TOKEN_SUFFIXES = (".npy", ".bin", ".idx")
PIECE_BYTES = 1 << 22
INSTALLED_PACKAGES = ("site-packages", "dist-packages")
STANDARD_LIBRARY_TESTS = ("test", "tests", "idle_test")
MAX_NAMED_SUFFIXES = 5  # in the line about skipped files
_KEYS_OF_ROWS = "set data.column to the column with their text, or data.chat=true for conversations"
_HUB_REPOSITORY = re.compile(r"(models|datasets|spaces)--")  # prefix of a repository's folder in the hub's cache
_KEY_OF_TOKENS = "set data.suffixes=.npy or .bin,.idx"


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file to read."""

    path: Path
    name: str  # its path below the corpus's folder, with forward slashes
    num_bytes: int
    digest: str  # of its contents


def find_text_files(
    path: str | Path | None, *, suffixes: Sequence[str] = TEXT_SUFFIXES, include_tests: bool = False
) -> list[tuple[str, Path]]:
    """Find the text files of a corpus, as sorted pairs of the name relative to the folder and the path.

    Hidden files and folders are skipped.

    Args:
        path: a text file, with any suffix except those of rows, or a folder; None for the `.py` files of the running
            Python's standard library.
        suffixes: suffixes of the files to read in a folder.
        include_tests: whether to include the standard library's tests.

    Raises:
        ValueError: the path does not exist, the folder has no such file, or the files have rows, which are not text.
    """
    rows = [suffix for suffix in suffixes if suffix in TABLE_SUFFIXES]
    if rows:
        raise ValueError(f"data.suffixes={','.join(rows)} would read rows as text; {_KEYS_OF_ROWS}")
    tokens = [suffix for suffix in suffixes if suffix in TOKEN_SUFFIXES]
    if tokens:
        raise ValueError(f"data.suffixes={','.join(suffixes)} mixes text and tokens; name them in data.sources")
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
        raise ValueError(f"data.path={folder} does not exist; use a text file or a folder of them")
    files = sorted(_walk(folder, tuple(suffixes), {"__pycache__", *excluded}))
    if not files:
        advice = "set data.path to a folder of text" if path is None else "set data.suffixes to those it has"
        if any(_walk(folder, TABLE_SUFFIXES, {"__pycache__"})):
            advice = f"it has rows: {_KEYS_OF_ROWS}"
        elif any(_walk(folder, TOKEN_SUFFIXES, {"__pycache__"})):
            advice = f"it has tokens: {_KEY_OF_TOKENS}"
        raise ValueError(f"{folder} holds no files that end in {', '.join(suffixes)}; {advice}")
    return files


def _refuse_rows(file: Path) -> None:
    """Raise ValueError if a file has rows, judging by its name or its first line."""
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


def find_tables(
    path: str | Path | Sequence[Path] | None, *, suffixes: Sequence[str] = TABLE_SUFFIXES
) -> list[tuple[str, Path]]:
    """Find the files with rows of a corpus, as sorted pairs of the name relative to the folder and the path.

    In a folder from `datasets.Dataset.save_to_disk` these are the files that it lists. Hidden files and folders are
    skipped.

    Args:
        path: a file, a folder, or a list of files.
        suffixes: suffixes of the files to read in a folder.

    Raises:
        ValueError: the path does not exist, the folder has no such file, or it has several splits.
    """
    if path is None:
        raise ValueError("data.column and data.chat need data.path, a file or folder of rows")
    if not isinstance(path, (str, Path)):
        return [(file.name, file) for file in path]
    folder = Path(path)
    unknown = [suffix for suffix in suffixes if suffix not in TABLE_SUFFIXES]
    if unknown:
        raise ValueError(
            f"data.suffixes={','.join(unknown)}: rows are read from {', '.join(TABLE_SUFFIXES)}; remove others"
        )
    if folder.is_file():
        if folder.suffix not in TABLE_SUFFIXES:
            raise ValueError(
                f"data.path={folder} is not a file of rows ({', '.join(TABLE_SUFFIXES)}); unset data.column and "
                "data.chat to read it as text"
            )
        return [(folder.name, folder)]
    if not folder.is_dir():
        raise ValueError(f"data.path={folder} does not exist; use a file or folder of rows")
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(state.parent.name for state in folder.glob("*/state.json"))
        raise ValueError(f"data.path={folder} holds the splits {', '.join(splits)}; use the folder of one")
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return _files_of_saved_dataset(folder)
    files = sorted(_walk(folder, tuple(suffixes), {"__pycache__"}))
    if not files:
        raise ValueError(
            f"{folder} holds no files that end in {', '.join(suffixes)}; to read text, unset data.column and data.chat"
        )
    return files


def holds_tokens(path: str | Path | None, suffixes: Sequence[str] | None) -> bool:
    """Whether a path names tokens, by its suffix, as the prefix of a Megatron pair, or a folder by `suffixes`."""
    if path is None:
        return False
    file = Path(path)
    if file.is_dir():
        return bool(suffixes) and set(suffixes or ()) <= set(TOKEN_SUFFIXES)
    return file.suffix in TOKEN_SUFFIXES or (not file.exists() and _of_megatron(file, ".idx").is_file())


def find_tokens(path: str | Path, *, suffixes: Sequence[str] | None = None) -> list[tuple[str, Path]]:
    """Find the token files of a corpus, as sorted pairs of the name relative to the folder and the path.

    Args:
        path: a `.npy` or `.bin` file, either file of a Megatron pair or their common prefix, or a folder.
        suffixes: suffixes of the files to read in a folder; an `.idx` file includes its `.bin` file.

    Raises:
        ValueError: the path does not exist, the folder has no such file, or half of a Megatron pair is missing.
    """
    folder = Path(path)
    if folder.is_dir():
        files = sorted(_walk(folder, tuple(suffixes or TOKEN_SUFFIXES), {"__pycache__"}))
        if not files:
            raise ValueError(f"{folder} holds no files that end in {', '.join(suffixes or TOKEN_SUFFIXES)}")
    else:
        pair = [_of_megatron(folder, ".bin"), _of_megatron(folder, ".idx")]
        found = [folder] if folder.suffix == ".npy" else [file for file in pair if file.exists()]
        files = [(file.name, file) for file in found if file.exists()]
        if not files:
            raise ValueError(f"data.path={folder} does not exist; use a .npy or .bin file, or a Megatron prefix")
    named = {file for _, file in files}
    for name, file in list(files):
        partner = file.with_suffix(".bin")
        if file.suffix == ".idx" and partner not in named:
            if not partner.is_file() or not _stays_in(file.parent, partner):
                raise ValueError(f"{file} is half of a pair, but {partner.name} is missing; put it beside {file.name}")
            files.append((Path(name).with_suffix(".bin").as_posix(), partner))
    return sorted(files)


def _of_megatron(path: Path, suffix: str) -> Path:
    """Return a file of a pair, given either file or their prefix, which may have dots."""
    return path.with_suffix(suffix) if path.suffix in (".bin", ".idx") else path.with_name(path.name + suffix)


def _files_of_saved_dataset(folder: Path) -> list[tuple[str, Path]]:
    """Return the files that the folder's `state.json` lists; others beside them are caches of derived data."""
    try:
        entries = json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]
        names = [Path(entry["filename"]).name for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / 'state.json'} lists no files of a dataset; save the dataset again") from error
    leaving = [name for name in names if not _stays_in(folder, folder / name)]
    if leaving:
        raise ValueError(f"{folder / leaving[0]} is a link out of its folder; use its target as data.path")
    return [(name, folder / name) for name in names]


def files_left_out(path: str | Path | None, suffixes: Sequence[str] | None, *, takes_rows: bool) -> str | None:
    """Return a line about the visible files of a folder that are skipped, with the keys that would include them.

    Args:
        path: the path, as for `find_text_files`, `find_tables` and `find_tokens`.
        suffixes: suffixes of the files that are read; None for those of text or rows.
        takes_rows: whether rows are read, not text.

    Returns:
        The line; None if nothing is skipped, or the path is not a folder.
    """
    if path is None or not Path(path).is_dir() or (Path(path) / "state.json").is_file():
        return None
    folder = Path(path)
    taken = tuple(suffixes or (TABLE_SUFFIXES if takes_rows else TEXT_SUFFIXES))
    names = [name for name, _ in _walk(folder, ("",), {"__pycache__"}) if not name.endswith(taken)]
    if takes_rows:  # which may name images
        names = [name for name in names if not name.lower().endswith(IMAGE_SUFFIXES)]
    left = Counter(Path(name).suffix for name in names).most_common()
    named = [f"{count} {suffix or 'without suffix'}{_key_of(suffix, taken)}" for suffix, count in left]
    further = [f"{len(left) - MAX_NAMED_SUFFIXES} more kinds"] if len(left) > MAX_NAMED_SUFFIXES else []
    links = sum(not _stays_in(folder, file) for _, file in _walk(folder, taken, {"__pycache__"}, with_links=True))
    leaving = [f"{links} links out of the folder (data.sources takes their targets)"] if links else []
    parts = named[:MAX_NAMED_SUFFIXES] + further + leaving
    return f"files in data.path not read: {', '.join(parts)}" if parts else None


def _key_of(suffix: str, taken: Sequence[str]) -> str:
    """Return the key that would include files with a suffix, in parentheses."""
    if suffix in TABLE_SUFFIXES:
        return " (data.suffixes takes them)" if taken[0] in TABLE_SUFFIXES else " (data.column or data.chat takes them)"
    if suffix in TOKEN_SUFFIXES:
        return " (data.suffixes takes them alone)"
    if taken[0] in (*TABLE_SUFFIXES, *TOKEN_SUFFIXES):
        return ""  # text is not read together with them
    return " (data.suffixes takes them)" if suffix else ""


def _walk(
    folder: Path, suffixes: tuple[str, ...], excluded: set[str], *, with_links: bool = False
) -> Iterator[tuple[str, Path]]:
    """Yield visible files with these suffixes; `with_links` includes links out of the folder."""
    for parent, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if name not in excluded and not name.startswith(".")]
        for name in names:
            file = Path(parent, name)
            if name.endswith(suffixes) and not name.startswith(".") and (with_links or _stays_in(folder, file)):
                yield file.relative_to(folder).as_posix(), file


def _stays_in(folder: Path, file: Path) -> bool:
    return not file.is_symlink() or target_stays_in(folder, file)


def target_stays_in(folder: Path, file: Path) -> bool:
    """Whether a file is inside a folder after following all links; a snapshot of the hub may link to its blobs."""
    target, own = Path(os.path.realpath(file)), Path(os.path.realpath(folder))
    if own.parent.name == "snapshots" and _HUB_REPOSITORY.match(own.parents[1].name):
        # A snapshot in the cache of the Hugging Face hub is a folder of links to its blobs.
        return target.is_relative_to(own) or target.is_relative_to(own.parents[1] / "blobs")
    return target.is_relative_to(own)


def scan_text_files(files: Iterable[tuple[str, Path]]) -> tuple[list[SourceFile], Counter[str]]:
    """Read each file once for its digest, and count empty, unreadable and other files that are skipped, by reason."""
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


def scan_files(files: Iterable[tuple[str, Path]]) -> list[SourceFile]:
    """Read each file with rows or tokens once for its digest; raises ValueError if a file cannot be read."""
    scanned = []
    for name, path in files:
        try:
            _check_is_file(path)
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}; fix it, or remove it from data.path") from error
        scanned.append(SourceFile(path=path, name=name, num_bytes=path.stat().st_size, digest=digest))
    return scanned


def _check_is_file(path: Path) -> None:
    # Only files: opening a pipe waits for a writer, and a device may never end.
    if not path.is_file():
        raise OSError(f"{path} is not a file")


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
    """Yield the text of a file in pieces of a few million characters that end at line ends."""
    with path.open(encoding="utf-8", newline="") as stream:
        while piece := stream.read(PIECE_BYTES):
            yield piece + stream.readline()
