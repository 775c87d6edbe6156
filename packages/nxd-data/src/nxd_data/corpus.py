"""The token cache on disk: a corpus is tokenized once into a flat file, and then memory-mapped.

A cache entry is a folder named by a digest of the files' names and contents and the tokenizer. It is written under a
temporary name and published by a rename, so an existing entry is complete, and any number of processes may build the
same one concurrently.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxd_data.pretokenized import Document, TokenDtype, read_documents
from nxd_data.sources import (
    TABLE_SUFFIXES,
    TEXT_SUFFIXES,
    SourceFile,
    find_tables,
    find_text_files,
    find_tokens,
    holds_tokens,
    read_pieces,
    scan_files,
    scan_text_files,
)
from nxd_data.tables import read_texts
from nxd_data.tokenizer import Tokenizer, encode_prompt

FORMAT = 1
TOKENS_FILE = "tokens.bin"
INDEX_FILE = "index.json"
_SECONDS_TO_LOCK = 60.0  # a younger folder may not have been locked yet


@dataclass(frozen=True, kw_only=True)
class CorpusIndex:
    """The metadata of a tokenized corpus, without its tokens."""

    digest: str  # of everything the tokens depend on; also the entry's name
    dtype: str  # uint16 or uint32
    num_tokens: int
    num_documents: int
    num_bytes: int  # of the text
    vocab_size: int
    end_of_document: int
    skipped: dict[str, int]  # files or rows left out, by reason


@dataclass(frozen=True)
class Corpus:
    """A tokenized corpus: its documents concatenated, each followed by the end-of-document token."""

    tokens: NDArray[Any]  # [num_tokens], memory-mapped, uint16 or uint32
    index: CorpusIndex


def build_corpus(
    path: str | Path | Sequence[Path] | None,
    tokenizer: Tokenizer,
    *,
    cache_folder: str | Path,
    suffixes: Sequence[str] | None = None,
    include_tests: bool = False,
    column: str | None = None,
    token_dtype: TokenDtype | None = None,
    vocab_size: int | None = None,
) -> Path:
    """Tokenize a corpus, unless it is cached, and return its entry for `open_corpus`.

    Every text file is a document; with `column` every row is one. Existing tokens are checked and copied unchanged. The
    files are read once to check that the entry is still valid.

    Args:
        path, suffixes, include_tests: files to read, as for `find_text_files`, or with `column` as for `find_tables`;
            the default suffixes are those of text, or of rows. Paths that `holds_tokens` are read by `find_tokens`.
        tokenizer: the tokenizer.
        cache_folder: folder of the cache; created if missing.
        column: text column in files with rows.
        token_dtype: dtype of flat `.bin` files.
        vocab_size: the model's vocabulary size, if larger than the tokenizer's.

    Raises:
        ValueError: there are no files or no text, rows cannot be read or lack the column, or tokens are outside the
            model's vocabulary.
    """
    skipped: Counter[str] = Counter()
    vocab_size = max(tokenizer.vocab_size, vocab_size or 0)
    origin: dict[str, object] = {}
    if isinstance(path, (str, Path)) and holds_tokens(path, suffixes):
        files = scan_files(find_tokens(path, suffixes=suffixes))
        origin["tokens"] = [token_dtype, vocab_size]
    elif column is not None:
        files = scan_files(find_tables(path, suffixes=suffixes or TABLE_SUFFIXES))
        origin["column"] = column
    elif path is not None and not isinstance(path, (str, Path)):
        raise ValueError("files with rows need data.column; set it to the column with their text")
    else:
        found = find_text_files(path, suffixes=suffixes or TEXT_SUFFIXES, include_tests=include_tests)
        files, skipped = scan_text_files(found)
    if not files:
        raise _no_text(path, skipped)
    digest = _corpus_digest(files, tokenizer, origin)

    def write(folder: Path) -> None:
        if "tokens" in origin:
            documents = _checked(read_documents(files, token_dtype), path, vocab_size)
        else:
            documents = _tokenized(_documents(files, column, skipped), tokenizer)
        dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        num_documents, num_tokens = _write_tokens(folder / TOKENS_FILE, documents, dtype)
        if not num_tokens:
            raise _no_text(path, skipped)
        index = CorpusIndex(
            digest=digest,
            dtype=dtype,
            num_tokens=num_tokens,
            num_documents=num_documents,
            num_bytes=sum(file.num_bytes for file in files),
            vocab_size=vocab_size,
            end_of_document=tokenizer.end_of_document,
            skipped=dict(skipped),
        )
        (folder / INDEX_FILE).write_text(json.dumps(asdict(index), indent=2) + "\n", encoding="utf-8")

    return make_entry(Path(cache_folder), digest, write)


def make_entry(cache_folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Return the cache entry with this name; `write` fills its folder if it does not exist yet."""
    entry = cache_folder / name
    if entry.is_dir():
        return entry
    entry.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(entry)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=entry.parent))
    lock = os.open(unfinished, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks: no other process can lock it either
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write(unfinished)
        unfinished.chmod(0o755)  # mkdtemp's folders are private, but a cache is shared
        try:
            unfinished.rename(entry)
        except OSError:
            if not entry.is_dir():  # otherwise another process published the same content first
                raise
    finally:
        os.close(lock)
        shutil.rmtree(unfinished, ignore_errors=True)
    return entry


def _remove_abandoned(entry: Path) -> None:
    """Remove the unlocked folders of an entry that killed processes left behind."""
    for folder in entry.parent.glob(f".{entry.name}.*"):
        with suppress(OSError):  # locked, or already gone
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(lock).st_mtime > _SECONDS_TO_LOCK:
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def open_corpus(entry: str | Path) -> Corpus:
    """Memory-map a cache entry that `build_corpus` returned, in this or another process.

    Raises:
        ValueError: the entry is missing or damaged.
    """
    entry = Path(entry)
    advice = f"delete {entry} to rebuild it"
    try:
        index = CorpusIndex(**json.loads((entry / INDEX_FILE).read_text(encoding="utf-8")))
        num_bytes = (entry / TOKENS_FILE).stat().st_size
    except OSError as error:
        raise ValueError(f"token cache entry cannot be read: {error}; {advice}") from error
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"token cache entry {entry} has a damaged {INDEX_FILE}; {advice}") from error
    expected = index.num_tokens * np.dtype(index.dtype).itemsize
    if num_bytes != expected or not expected:
        raise ValueError(f"{entry / TOKENS_FILE} has {num_bytes} bytes, not {expected}; {advice}")
    tokens = np.memmap(entry / TOKENS_FILE, dtype=index.dtype, mode="r", shape=(index.num_tokens,))
    return Corpus(tokens, index)


def _no_text(path: object, skipped: Counter[str]) -> ValueError:
    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "no rows"
    source = "the standard library" if path is None else f"data.path={path}"
    return ValueError(f"{source} holds no text: {reasons}; set data.path to UTF-8 text files")


def _corpus_digest(files: list[SourceFile], tokenizer: Tokenizer, origin: dict[str, object]) -> str:
    content: dict[str, object] = {
        "format": FORMAT,
        "tokenizer": [tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.end_of_document],
        "files": [(file.name, file.num_bytes, file.digest) for file in files],
        **origin,
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def _documents(files: Iterable[SourceFile], column: str | None, skipped: Counter[str]) -> Iterator[Iterable[str]]:
    """Yield the pieces of text of each document, and count rows without text."""
    for file in files:
        if column is None:
            yield read_pieces(file.path)
            continue
        for text in read_texts(file.path, column):
            if text:
                yield (text,)
            else:
                skipped["rows without text"] += 1


def _tokenized(documents: Iterable[Iterable[str]], tokenizer: Tokenizer) -> Iterator[Document]:
    """Yield the tokens of each document, with the tokenizer's prefix and the end-of-document token."""
    end = np.array([tokenizer.end_of_document])
    for document in documents:
        pieces = iter(document)
        first = np.array(encode_prompt(tokenizer, next(pieces, "")), dtype=np.int64)
        yield chain([first], map(tokenizer.encode, pieces), [end])


def _checked(documents: Iterable[Document], path: object, vocab_size: int) -> Iterator[Document]:
    """Check that every token of the documents is in the model's vocabulary."""

    def checked(document: Document) -> Document:
        for tokens in document:
            strange = tokens[(tokens < 0) | (tokens >= vocab_size)]
            if len(strange):
                raise ValueError(
                    f"data.path={path} has token {strange[0]}, but the model has {vocab_size} ids; set "
                    "data.tokenizer to the one that made the tokens, or data.token_dtype to their type"
                )
            yield tokens

    return map(checked, documents)


def _write_tokens(file: Path, documents: Iterable[Document], dtype: str) -> tuple[int, int]:
    """Write the tokens of all documents, and return the numbers of documents and tokens."""
    num_documents = num_tokens = 0
    with file.open("wb") as stream:
        for document in documents:
            for tokens in document:
                stream.write(tokens.astype(dtype).tobytes())
                num_tokens += len(tokens)
            num_documents += 1
        stream.flush()
        os.fsync(stream.fileno())
    return num_documents, num_tokens
