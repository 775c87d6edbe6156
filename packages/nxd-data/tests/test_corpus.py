import json
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from nxd_data import ByteTokenizer, build_corpus, open_corpus, sources


class NeverUsed(ByteTokenizer):
    """Fails if the corpus is tokenised again; otherwise the byte tokenizer in every respect."""

    def encode(self, text):
        raise AssertionError("the cache was not used")


class WideTokenizer(ByteTokenizer):
    vocab_size = 100_000
    fingerprint = "wide"

    def encode(self, text):
        return super().encode(text) + 99_000


class FailsAtTheSecondFile(ByteTokenizer):
    def encode(self, text):
        if text == "zwei":
            raise RuntimeError("lost")
        return super().encode(text)


def build(path, tmp_path, tokenizer=None):
    return build_corpus(path, tokenizer or ByteTokenizer(), cache_folder=tmp_path / "cache")


def test_documents_stand_in_order_each_with_its_end(text_folder, tmp_path):
    corpus = open_corpus(build(text_folder, tmp_path))

    assert corpus.tokens.tolist() == [*b"one\r\ntwo\n", 256, *b"zwei", 256]
    assert (corpus.index.num_tokens, corpus.index.num_documents, corpus.index.num_bytes) == (15, 2, 13)
    assert (corpus.index.vocab_size, corpus.index.end_of_document, corpus.index.skipped) == (257, 256, {})


def test_text_longer_than_a_piece_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 5)
    text = "äöü\nß" * 50 + "🙂\n\n" + "no line end" * 9
    (tmp_path / "long.txt").write_text(text)

    corpus = open_corpus(build(tmp_path / "long.txt", tmp_path))

    assert bytes(corpus.tokens[:-1].tolist()).decode() == text


def test_tokens_are_memory_mapped_in_the_narrowest_type(text_folder, tmp_path):
    narrow = open_corpus(build(text_folder, tmp_path)).tokens
    wide = open_corpus(build(text_folder, tmp_path, WideTokenizer())).tokens

    assert isinstance(narrow, np.memmap)
    assert (narrow.dtype, wide.dtype) == (np.uint16, np.uint32)
    assert wide[0] == 99_000 + ord("o")


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_tokens_are_wide_as_soon_as_the_largest_id_needs_it(text_folder, tmp_path, vocab_size, dtype):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = vocab_size
    tokenizer.end_of_document = vocab_size - 1

    corpus = open_corpus(build(text_folder, tmp_path, tokenizer))

    assert corpus.tokens.dtype == dtype
    assert corpus.tokens[-1] == vocab_size - 1


def test_entry_can_be_read_by_others(text_folder, tmp_path):
    assert stat.S_IMODE(build(text_folder, tmp_path).stat().st_mode) == 0o755


def test_second_build_uses_the_cache(text_folder, tmp_path):
    first = build(text_folder, tmp_path)

    assert build(text_folder, tmp_path, NeverUsed()) == first


def test_moved_folder_uses_the_cache(text_folder, tmp_path):
    first = build(text_folder, tmp_path)
    moved = text_folder.rename(tmp_path / "moved")

    assert build(moved, tmp_path, NeverUsed()) == first


@pytest.mark.parametrize("change", ["content of the same size", "file name", "new file", "tokenizer"])
def test_change_of_anything_that_matters_makes_another_entry(text_folder, tmp_path, change):
    tokenizer = ByteTokenizer()
    first = build(text_folder, tmp_path, tokenizer)
    if change == "content of the same size":
        (text_folder / "a.txt").write_text("ONE\r\ntwo\n")
    elif change == "file name":
        (text_folder / "a.txt").rename(text_folder / "aa.txt")
    elif change == "new file":
        (text_folder / "c.txt").write_text("three")
    else:
        tokenizer.fingerprint = "other"

    assert build(text_folder, tmp_path, tokenizer) != first


def test_files_without_text_are_skipped_and_counted(text_folder, tmp_path):
    (text_folder / "empty.txt").touch()
    (text_folder / "latin1.txt").write_bytes("naïve".encode("latin-1"))
    (text_folder / "cut.txt").write_bytes("é".encode()[:1])
    (text_folder / "binary.txt").write_bytes(b"a\0b")
    (text_folder / "dangling.txt").symlink_to("nowhere.txt")

    corpus = open_corpus(build(text_folder, tmp_path))

    assert corpus.index.skipped == {"binary or not UTF-8": 3, "empty": 1, "unreadable": 1}
    assert corpus.index.num_documents == 2


def test_no_text_at_all_says_why(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").touch()
    (tmp_path / "text" / "b.txt").write_bytes(b"\xff")

    with pytest.raises(ValueError, match=r"holds no text: 1 empty, 1 binary or not UTF-8; set data\.path"):
        build(tmp_path / "text", tmp_path)


def test_failure_while_tokenising_leaves_nothing(text_folder, tmp_path):
    with pytest.raises(RuntimeError, match="lost"):
        build(text_folder, tmp_path, FailsAtTheSecondFile())

    assert os.listdir(tmp_path / "cache") == []


def test_builds_at_the_same_time_make_one_entry(text_folder, tmp_path):
    with ThreadPoolExecutor(8) as pool:
        entries = set(pool.map(lambda _: build(text_folder, tmp_path), range(16)))

    (entry,) = entries
    assert os.listdir(tmp_path / "cache") == [entry.name]
    assert len(open_corpus(entry).tokens) == 15


def test_file_in_the_place_of_an_entry_is_an_error(text_folder, tmp_path):
    entry = build(text_folder, tmp_path)
    shutil.rmtree(entry)
    entry.touch()

    with pytest.raises(NotADirectoryError):
        build(text_folder, tmp_path)


def test_open_missing_entry_says_so(tmp_path):
    with pytest.raises(ValueError, match="token cache entry cannot be read"):
        open_corpus(tmp_path / "absent")


def test_open_shortened_entry_says_what_to_delete(text_folder, tmp_path):
    entry = build(text_folder, tmp_path)
    tokens = entry / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-1])

    with pytest.raises(ValueError, match=f"has 29 bytes, not 30; delete {entry}"):
        open_corpus(entry)


@pytest.mark.parametrize("content", ["{", json.dumps({"digest": "a"}), "[]"])
def test_open_entry_with_a_damaged_index_says_what_to_delete(text_folder, tmp_path, content):
    entry = build(text_folder, tmp_path)
    (entry / "index.json").write_text(content)

    with pytest.raises(ValueError, match=r"damaged index\.json; delete"):
        open_corpus(entry)
