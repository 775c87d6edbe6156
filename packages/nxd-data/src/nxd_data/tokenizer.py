"""Tokenizers: one token per byte, or a Hugging Face tokenizer from a local file or folder. Nothing is downloaded."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# End-of-document tokens of well-known vocabularies, for a tokenizer that does not name its own.
END_OF_DOCUMENT_TEXTS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")

_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # as SentencePiece writes it
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
# Byte-level vocabularies write each byte as one character: a visible one of Latin-1 unchanged, the n-th other byte as
# character 256 + n.
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {
    chr(256 + number): byte for number, byte in enumerate(byte for byte in range(256) if byte not in _VISIBLE)
}


class Tokenizer(Protocol):
    """The tokenizer interface that data and text generation need."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def end_of_document(self) -> int:
        """The id that follows each document."""

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """The ids of tokens by their spelling in the vocabulary."""

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids that are not text, such as ends of documents and turns."""

    @property
    def prefix(self) -> tuple[int, ...]:
        """The ids that the tokenizer puts before every text, such as Gemma's `<bos>`; usually none."""

    @property
    def fingerprint(self) -> str:
        """A string that changes whenever the same text would give different ids."""

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the ids `[tokens]` of a text or a part of one, without special tokens around it."""

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids, ignoring ids outside the vocabulary and, unless requested, special ones."""


class ByteTokenizer:
    """One token per byte of UTF-8, and 256 for the end of a document.

    >>> ByteTokenizer().encode("nxd").tolist()
    [110, 120, 100]
    """

    vocab_size = 257
    end_of_document = 256
    vocabulary = MappingProxyType({**{f"<0x{byte:02X}>": byte for byte in range(256)}, END_OF_DOCUMENT_TEXTS[0]: 256})
    special_ids = frozenset({256})
    prefix = ()
    fingerprint = "bytes"

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the UTF-8 bytes of a text, `[tokens]`."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of bytes, with U+FFFD for invalid UTF-8."""
        end = b"" if skip_special_tokens else END_OF_DOCUMENT_TEXTS[0].encode()
        known = (bytes([token]) if token < self.end_of_document else end for token in tokens if token < self.vocab_size)
        return b"".join(known).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the byte of a token; empty for the end of a document."""
        return bytes([token]) if token < self.end_of_document else b""


class HuggingFaceTokenizer:
    """A tokenizer as Hugging Face models ship it: `tokenizer.json`, or a folder with one or with older files.

    A `tokenizer.json` is read with the package `tokenizers`; a folder without one needs `transformers`.

    Args:
        path: the file or the folder.

    Raises:
        ValueError: there is no usable tokenizer, it has no end-of-document token, or the package is not installed.
    """

    def __init__(self, path: str | Path):
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if file.is_file():
            self._load_file(file)
        elif path.is_dir():
            self._load_folder(path)
        else:
            raise ValueError(f"data.tokenizer={path} does not exist; use a tokenizer.json or its folder")
        self.vocab_size = max(self.vocabulary.values()) + 1
        if self.prefix:  # older versions left it out, so the same text gave different ids
            self.fingerprint += f" after one {self.prefix}"

    def _load_file(self, file: Path) -> None:
        tokenizers = _import_reader("tokenizers", file)
        _check_growth(file)
        try:
            tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises plain Exception
            is_pointer = file.read_bytes()[: len(_LFS_POINTER)] == _LFS_POINTER
            reason = "it is a Git LFS pointer; fetch the file with `git lfs pull`" if is_pointer else str(error)
            raise ValueError(f"data.tokenizer: {file} is not a Hugging Face tokenizer: {reason}") from error
        cut_texts = tokenizer.truncation is not None or tokenizer.padding is not None
        _take_whole_texts(tokenizer)
        self.vocabulary: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        if not self.vocabulary:
            raise ValueError(f"data.tokenizer: {file} has an empty vocabulary; use a tokenizer with tokens")
        self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        self._decode = tokenizer.decode
        added = tokenizer.get_added_tokens_decoder().items()
        self.special_ids = frozenset(number for number, token in added if token.special)
        self.prefix = self._find_prefix(lambda text: tokenizer.encode(text, add_special_tokens=True).ids)
        self.end_of_document = _find_end_of_document(file, self.vocabulary)
        self.fingerprint = f"tokenizers {self.end_of_document} {digest_files([file])}"
        if cut_texts:  # older versions applied these, so the same text gave different ids
            self.fingerprint += " whole"

    def _load_folder(self, folder: Path) -> None:
        tokenizer = load_tokenizer_of_transformers(folder)
        if tokenizer.eos_token_id is None:
            raise ValueError(f"data.tokenizer={folder} has no eos_token to end documents with")
        self.vocabulary = tokenizer.get_vocab()
        self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        self._decode = tokenizer.decode
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self.prefix = self._find_prefix(lambda text: tokenizer.encode(text, add_special_tokens=True))
        self.end_of_document = int(tokenizer.eos_token_id)
        files = sorted(file for file in folder.iterdir() if file.suffix in (".json", ".txt", ".model"))
        self.fingerprint = f"transformers {self.end_of_document} {digest_files(files)}"

    def _find_prefix(self, encode_marked: Callable[[str], list[int]]) -> tuple[int, ...]:
        """Return the ids that the tokenizer adds before a text; `encode_marked` encodes with special tokens."""
        probes = ((text, self._encode(text)) for text in chain("a", islice(self.vocabulary, 1000)))
        # Not a special token, which would hide where the text starts; the vocabulary has no fixed order.
        probe, plain = next(((text, ids) for text, ids in probes if ids and self.special_ids.isdisjoint(ids)), ("", []))
        marked = encode_marked(probe)
        starts = range(len(marked) - len(plain) + 1)
        start = next((start for start in starts if marked[start : start + len(plain)] == plain), 0)
        return tuple(marked[:start])

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the ids `[tokens]` of a text, without special tokens around it.

        Raises:
            ValueError: the tokenizer cannot encode the text.
        """
        with encoding_errors():
            return np.asarray(self._encode(text), dtype=np.int64)

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the ids."""
        known = [token for token in tokens if token < self.vocab_size]
        text: str = self._decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, which may be only a part of a character."""
        written = self._tokens.get(token, "")
        if _BYTE_TOKEN.fullmatch(written):  # in vocabularies with byte fallback
            return bytes([int(written[3:5], 16)])
        if self._is_byte_level and token not in self.special_ids and set(written) <= _BYTE_OF.keys():
            return bytes(_BYTE_OF[character] for character in written)
        if _SPACE in written:  # which decoding drops at the start of a text
            return written.replace(_SPACE, " ").encode()
        return self.decode([token], skip_special_tokens=False).encode(errors="replace")

    @cached_property
    def _tokens(self) -> Mapping[int, str]:
        return {number: written for written, number in self.vocabulary.items()}

    @cached_property
    def _is_byte_level(self) -> bool:
        return self.vocabulary.keys() >= _BYTE_OF.keys()


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a prompt or document, with the tokenizer's beginning-of-text token exactly once, if any."""
    ids: list[int] = tokenizer.encode(text).tolist()
    prefix = list(tokenizer.prefix)
    return ids if ids[: len(prefix)] == prefix else prefix + ids


def load_tokenizer(path: str | Path | None) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names: bytes for None, otherwise a Hugging Face file or folder."""
    return ByteTokenizer() if path is None else HuggingFaceTokenizer(path)


def load_tokenizer_of_transformers(folder: Path) -> Any:
    """Load the tokenizer in a folder with transformers; a tokenizer that needs its own code is refused.

    Raises:
        ValueError: there is no tokenizer, or transformers is not installed.
    """
    transformers = _import_reader("transformers", folder)
    try:
        # With trust_remote_code unset, transformers would ask at the terminal.
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # readers of many formats raise many types
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"data.tokenizer={folder} is not a Hugging Face tokenizer: {reason}") from error
    if tokenizer.is_fast:
        _take_whole_texts(tokenizer.backend_tokenizer)
    return tokenizer


@contextmanager
def encoding_errors() -> Iterator[None]:
    """Raise ValueError for a text that the package tokenizers cannot encode.

    It raises TypeError for half a character, and PanicException, which is not an Exception, if a regular expression
    takes too long.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, TypeError) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer cannot encode a text: {error}") from error


def _take_whole_texts(tokenizer: Any) -> None:
    """Turn off truncation and padding, which a tokenizer.json that was saved after use may contain."""
    tokenizer.no_truncation()
    tokenizer.no_padding()


def _import_reader(package: str, path: Path) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise ValueError(
            f"data.tokenizer={path} needs the package {package}: pip install {package}, "
            "or leave data.tokenizer unset for one token per byte"
        ) from error


_MOST_GROWTH = 32  # of a text, in all steps; Unicode normalization alone expands up to 18 times
_MOST_STEPS = 64
_GROWTH = {"ByteLevel": 4, "BertNormalizer": 3}  # how many characters one may become, by type of step


def _check_growth(file: Path) -> None:
    """Raise ValueError if the steps of a tokenizer.json could expand a text until memory is exhausted."""
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError):  # the package reports it
        return
    if not isinstance(content, dict):
        return
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        steps = list(_steps(content.get(part), 0))
        growth = _growth(steps)
        if growth > _MOST_GROWTH or len(steps) > _MOST_STEPS:
            raise ValueError(
                f"data.tokenizer: the {part} of {file} has {len(steps)} steps, which expand a text up to {growth:.3g} "
                f"times; at most {_MOST_STEPS} steps and {_MOST_GROWTH} times are allowed"
            )


def _steps(part: Any, nesting: int) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a part of a tokenizer.json in order."""
    if not isinstance(part, dict):
        return
    lists = [part[key] for key in ("normalizers", "pretokenizers", "decoders", "processors") if key in part]
    if part.get("type") != "Sequence" or not lists or nesting > _MOST_STEPS:
        yield part
    for steps in lists:
        for step in steps if isinstance(steps, list) else ():
            yield from _steps(step, nesting + 1)


def _growth(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return how many times longer a text can become.

    A replacement multiplies the growth of an earlier step only if its pattern can match that step's output: for plain
    texts, if they share a character. If other types of steps change characters, any pattern may match.
    """
    known = all(step.get("type") in ("Replace", "Prepend", "Strip", "ByteFallback", "Fuse") for step in steps)
    made: list[tuple[float, str]] = []  # for each step: the growth so far, and the characters that it writes
    for step in steps:
        finds, writes, own = _replacement(step)
        can_find = [growth for growth, text in made if finds is None or not known or set(finds) & set(text)]
        made.append((own * max([1.0, *can_find]), writes))
    return max((growth for growth, _ in made), default=1.0)


def _replacement(step: Mapping[str, Any]) -> tuple[str | None, str, float]:
    """Return the text that a step replaces (None: any), the replacement, and how many times longer that is."""
    if step.get("type") == "Replace":
        pattern, writes = step.get("pattern"), str(step.get("content", ""))
        plain = pattern.get("String") if isinstance(pattern, dict) else None
        if plain:
            return str(plain), writes, max(1.0, len(writes) / len(str(plain)))
        return None, writes, max(1.0, len(writes) + (1 if _may_be_empty(pattern) else 0))
    if step.get("type") == "TemplateProcessing":
        return None, "", float(_template_length(step))
    if step.get("type") == "Precompiled":
        return None, "", float(_longest_of_charsmap(step.get("precompiled_charsmap")))
    return None, "", float(_GROWTH.get(str(step.get("type")), 1))


def _may_be_empty(pattern: Any) -> bool:
    """Whether a regular expression matches between any two characters, as far as Python can tell."""
    try:
        return re.fullmatch(str(pattern["Regex"]), "") is not None
    except (re.error, KeyError, TypeError, RecursionError, OverflowError):
        return True


def _template_length(step: Mapping[str, Any]) -> int:
    """Return how often a template repeats the text; more than a few special tokens count as text."""
    single = step.get("single")
    pieces = [piece for piece in single if isinstance(piece, dict)] if isinstance(single, list) else []
    marks = sum("SpecialToken" in piece for piece in pieces)
    return max(1, sum("Sequence" in piece for piece in pieces), marks - _MOST_STEPS)


def _longest_of_charsmap(charsmap: Any) -> int:
    """Return the length of the longest replacement in SentencePiece's table, whose end they follow, null-terminated."""
    try:
        table = base64.b64decode(str(charsmap))
        texts = table[4 + int.from_bytes(table[:4], "little") :]
    except ValueError:  # not base64; the package reports it
        return 1
    return max(len(text.decode(errors="replace")) for text in texts.split(b"\0"))


def _find_end_of_document(file: Path, vocabulary: Mapping[str, int]) -> int:
    """Return the `eos_token` of the tokenizer_config.json beside the file, otherwise a well-known one."""
    config_file = file.with_name("tokenizer_config.json")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"data.tokenizer: {config_file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"data.tokenizer: {config_file} holds a {type(config).__name__}; expected an object")
    declared = config.get("eos_token")
    declared = declared.get("content") if isinstance(declared, dict) else declared
    if declared is not None and not isinstance(declared, str):
        raise ValueError(
            f"data.tokenizer: {config_file} has a {type(declared).__name__} as its eos_token; expected text"
        )
    candidates = END_OF_DOCUMENT_TEXTS if declared is None else (declared,)
    for candidate in candidates:
        if candidate in vocabulary:
            return vocabulary[candidate]
    raise ValueError(
        f"data.tokenizer: {file} has none of {', '.join(map(ascii, candidates))} to end a document with; "
        f'name one as "eos_token" in {config_file.name} beside it'
    )


def digest_files(files: list[Path]) -> str:
    """Return a digest of the names and contents of files, in order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
