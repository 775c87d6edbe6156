import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nxd_data import ByteTokenizer, build_corpus, open_corpus, pack_corpus


def pieces_of(sequences):
    """Numbers of the pieces, where token i of the row is i."""
    return (sequences.take(np.arange(len(sequences)))[:, 0] // sequences.sequence_length).tolist()


def test_pieces_share_one_token_and_cover_the_row(numbered):
    sequences, held_out = numbered(3)

    assert sequences.take(np.arange(3)).tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10, 11, 12]]
    assert len(held_out) == 0


def test_take_gives_samples_in_the_order_asked_for(numbered):
    sequences, _ = numbered(5)

    assert sequences.take(np.array([4, 0, 4]))[:, 0].tolist() == [16, 0, 16]


def test_tokens_after_the_last_whole_piece_are_left_out(text_folder, tmp_path):
    corpus = open_corpus(build_corpus(text_folder, ByteTokenizer(), cache_folder=tmp_path))

    sequences, _ = pack_corpus(corpus, sequence_length=6)  # 15 tokens

    assert sequences.take(np.arange(len(sequences))).tolist() == [[*b"one\r\ntw"], [*b"wo\n", 256, *b"zwe"]]


def test_last_piece_needs_a_token_more_for_its_label(text_folder, tmp_path):
    corpus = open_corpus(build_corpus(text_folder, ByteTokenizer(), cache_folder=tmp_path))

    sequences, _ = pack_corpus(corpus, sequence_length=5)  # 15 tokens

    assert len(sequences) == 2


# The fixture only makes a function, so that sharing it between examples is harmless.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_pieces=st.integers(2, 400), fraction=st.floats(0, 1, exclude_max=True))
def test_split_gives_each_piece_to_one_part(numbered, num_pieces, fraction):
    train, held_out = numbered(num_pieces, sequence_length=2, held_out_fraction=fraction)

    assert sorted(pieces_of(train) + pieces_of(held_out)) == list(range(num_pieces))
    assert len(train) > 0
    assert (len(held_out) > 0) == (fraction > 0)


def test_held_out_part_has_its_share_in_passages_from_everywhere(numbered):
    train, held_out = numbered(10_000, held_out_fraction=0.1)

    pieces = np.array(pieces_of(held_out))
    passages = np.split(pieces, np.flatnonzero(np.diff(pieces) > 1) + 1)
    assert (len(train), len(held_out)) == (9000, 1000)
    assert len(passages) == 64
    assert {len(passage) for passage in passages} == {15, 16}
    assert (pieces[0], pieces[-1]) == (141, 9999)


@pytest.mark.parametrize(("fraction", "least"), [(0.0, 1), (0.5, 2)])
def test_too_few_tokens_says_how_many_are_needed(numbered, fraction, least):
    numbered(least, held_out_fraction=fraction)

    with pytest.raises(ValueError, match=rf"has {least * 4 - 3} tokens; .* needs {least * 4 + 1}: add text"):
        numbered(least - 1, held_out_fraction=fraction)
