"""Tokens that others have made: each format gives the same corpus, and what is none is refused in one line."""

import struct

import numpy as np
import pytest
from nxd_data import ByteTokenizer, build_corpus, files_left_out, find_text_files, find_tokens, open_corpus

DOCUMENTS = [[5, 6, 7], [], [8, 256], [9]]
TOKENS = [5, 6, 7, 8, 256, 9]


def write_megatron(prefix, documents, dtype, code, *, gap=0):
    """As Megatron-LM's IndexedDatasetBuilder does; of each document one sequence, and of the first two."""
    sequences = [documents[0][:1], documents[0][1:], *documents[1:]]
    content, offsets = b"", []
    for sequence in sequences:
        offsets.append(len(content))
        content += np.array(sequence, dtype=dtype).tobytes() + b"\xff" * gap
    prefix.with_name(prefix.name + ".bin").write_bytes(content)
    bounds = [0, 2, *range(3, len(sequences) + 1)]
    prefix.with_name(prefix.name + ".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(sequences), len(bounds))
        + np.array([len(sequence) for sequence in sequences], dtype="<i4").tobytes()
        + np.array(offsets, dtype="<i8").tobytes()
        + np.array(bounds, dtype="<i8").tobytes()
    )


@pytest.fixture
def corpus_of(tmp_path):
    def build(path, **settings):
        entry = build_corpus(tmp_path / path, ByteTokenizer(), cache_folder=tmp_path / "cache", **settings)
        return open_corpus(entry)

    return build


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64", ">i8"])
def test_npy_file_is_a_corpus_as_it_stands(corpus_of, tmp_path, dtype):
    np.save(tmp_path / "tokens.npy", np.array(TOKENS, dtype=dtype))

    corpus = corpus_of("tokens.npy")

    assert corpus.tokens.tolist() == TOKENS
    assert (corpus.tokens.dtype, corpus.index.num_documents) == (np.uint16, 1)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_flat_file_is_read_as_the_type_that_is_given(corpus_of, tmp_path, dtype):
    np.array(TOKENS, dtype=dtype).tofile(tmp_path / "tokens.bin")

    assert corpus_of("tokens.bin", token_dtype=dtype).tokens.tolist() == TOKENS


@pytest.mark.parametrize("given", ["corpus_text_document", "corpus_text_document.bin", "corpus_text_document.idx"])
@pytest.mark.parametrize(("dtype", "code", "gap"), [("uint16", 8, 0), ("int32", 4, 4), ("int64", 5, 3)])
def test_megatron_pair_is_read_by_either_file_or_its_prefix(corpus_of, tmp_path, given, dtype, code, gap):
    write_megatron(tmp_path / "corpus_text_document", DOCUMENTS, dtype, code, gap=gap)

    corpus = corpus_of(given)

    assert corpus.tokens.tolist() == TOKENS
    assert corpus.index.num_documents == len(DOCUMENTS)


def test_folder_of_tokens_is_read_in_the_order_of_names(corpus_of, tmp_path):
    (tmp_path / "tokens").mkdir()
    write_megatron(tmp_path / "tokens/b.v2", DOCUMENTS, "uint16", 8)
    np.save(tmp_path / "tokens/a.npy", np.array([1, 2]))
    np.save(tmp_path / "tokens/c.npy", np.array([3]))
    (tmp_path / "tokens/notes.txt").write_text("x")

    assert [name for name, _ in find_tokens(tmp_path / "tokens", suffixes=(".idx",))] == ["b.v2.bin", "b.v2.idx"]
    assert corpus_of("tokens", suffixes=(".npy", ".idx")).tokens.tolist() == [1, 2, *TOKENS, 3]
    assert files_left_out(tmp_path / "tokens", (".npy", ".bin"), takes_rows=False) == (
        "files in data.path not read: 1 .idx (data.suffixes takes them alone), 1 .txt"
    )


def test_tokens_in_a_folder_are_not_text(tmp_path):
    np.save(tmp_path / "tokens.npy", np.array(TOKENS))

    with pytest.raises(ValueError, match=r"it has tokens: set data\.suffixes=\.npy or \.bin,\.idx"):
        find_text_files(tmp_path)
    with pytest.raises(ValueError, match=r"data\.suffixes=\.npy,\.txt mixes text and tokens; name them in data\.sour"):
        find_text_files(tmp_path, suffixes=(".npy", ".txt"))


def test_id_that_the_model_does_not_know_is_refused(corpus_of, tmp_path):
    np.save(tmp_path / "tokens.npy", np.array([1, 300]))

    with pytest.raises(ValueError, match=r"has token 300, but the model has 257 ids; set data\.tokenizer"):
        corpus_of("tokens.npy")
    assert corpus_of("tokens.npy", vocab_size=301).tokens.tolist() == [1, 300]


def test_flat_file_without_a_type_says_which_key_gives_it(corpus_of, tmp_path):
    (tmp_path / "tokens.bin").write_bytes(bytes(8))

    with pytest.raises(ValueError, match=r"no \.idx file beside it, .*; set data\.token_dtype to uint16, uint32"):
        corpus_of("tokens.bin")


def test_same_files_under_another_type_are_another_entry(corpus_of, tmp_path):
    np.array(TOKENS, dtype="uint32").tofile(tmp_path / "tokens.bin")

    narrow = corpus_of("tokens.bin", token_dtype="uint16")

    assert narrow.tokens.tolist()[:4] == [5, 0, 6, 0]
    assert corpus_of("tokens.bin", token_dtype="uint32").tokens.tolist() == TOKENS


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("lengths", [30, -1], "are out of order; rebuild it"),
        ("offsets", [-2, 60], "are out of order; rebuild it"),
        ("offsets", [0, 62], "names tokens past the end of a.bin, which has 120 bytes"),
        ("bounds", [0, 2, 1], "are out of order; rebuild it"),
        ("bounds", [1, 2, 2], "are out of order; rebuild it"),
    ],
)
def test_megatron_index_with_numbers_out_of_order_is_refused(corpus_of, tmp_path, field, values, message):
    numbers = {"lengths": [30, 30], "offsets": [0, 60], "bounds": [0, 1, 2]} | {field: values}
    (tmp_path / "a.bin").write_bytes(bytes(120))
    kinds = (("lengths", "<i4"), ("offsets", "<i8"), ("bounds", "<i8"))
    content = b"".join(np.array(numbers[name], dtype=kind).tobytes() for name, kind in kinds)
    (tmp_path / "a.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3) + content)

    with pytest.raises(ValueError, match=message):
        corpus_of("a.idx")
