"""A stream gives the same samples at any layout and after any stop, and reads no more than it needs."""

import json
from itertools import count, islice

import numpy as np
import pytest
import torch
from nxd_data import ByteTokenizer, StreamLoader, StreamSource, stream_files

LENGTH, AT_A_TIME, BATCH = 4, 5, 4
TEXTS = ["abc", "", "defghijklmnopqrstuvw", "x", "yz" * 40]


def stream_of(texts, at_a_time=AT_A_TIME):
    return StreamSource("texts", lambda start: iter(texts[start:]), ByteTokenizer(), LENGTH, at_a_time)


def loaders(stream, dp_size=1, accumulation=1):
    sizes = {"global_batch_size": BATCH, "gradient_accumulation_steps": accumulation, "dp_size": dp_size, "seed": 3}
    return [StreamLoader(stream, dp_rank=rank, **sizes) for rank in range(dp_size)]


def steps(ranks, number) -> list[list[list[int]]]:
    """The inputs of each step, `[global batch, seq]`."""
    found = []
    for _ in range(number):
        of_ranks = [loader.next_step() for loader in ranks]
        rows = [batch.input_ids for batches in zip(*of_ranks, strict=True) for batch in batches]
        found.append(torch.cat(rows).tolist())
    return found


def endless_row(number) -> list[int]:
    tokens = [token for text in TEXTS if text for token in [*text.encode(), ByteTokenizer.end_of_document]]
    return (tokens * (number // len(tokens) + 1))[:number]


def test_each_block_has_the_next_sequences_of_the_endless_row_in_another_order():
    num_blocks = 16
    row = endless_row(num_blocks * AT_A_TIME * LENGTH)

    (samples,) = [[sample for step in steps(loaders(stream_of(TEXTS)), 20) for sample in step]]

    for block in range(num_blocks):
        whole = np.array(row[block * AT_A_TIME * LENGTH :][: AT_A_TIME * LENGTH]).reshape(AT_A_TIME, LENGTH).tolist()
        assert sorted(samples[block * AT_A_TIME :][:AT_A_TIME]) == sorted(whole)
    assert samples != np.array(row).reshape(-1, LENGTH).tolist()


def test_each_row_begins_as_the_tokenizer_begins_a_text():
    class WithPrefix(ByteTokenizer):
        prefix = (256,)

    (loader,) = loaders(StreamSource("texts", lambda start: iter(TEXTS[start:]), WithPrefix(), LENGTH, 1))

    (batch,) = loader.next_step()

    assert batch.input_ids.flatten().tolist()[:8] == [256, *b"abc", 256, 256, *b"de"]


def test_labels_are_the_next_tokens_and_all_are_counted():
    (loader,) = loaders(stream_of(TEXTS, at_a_time=1))

    (batch,) = loader.next_step()

    row = endless_row(BATCH * LENGTH + 1)
    assert batch.input_ids.flatten().tolist() == row[:-1]
    assert batch.labels.flatten().tolist() == row[1:]
    assert loader.tokens_learned == loader.tokens_seen == BATCH * LENGTH
    assert batch.normalizer.tolist() == [BATCH * LENGTH, 1]


@pytest.mark.parametrize(("dp_size", "accumulation"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_order_does_not_depend_on_the_layout(dp_size, accumulation):
    ranks = loaders(stream_of(TEXTS), dp_size, accumulation)

    assert steps(ranks, 12) == steps(loaders(stream_of(TEXTS)), 12)


@pytest.mark.parametrize("stop", range(1, 12))
def test_stopped_stream_goes_on_at_another_layout_as_if_it_had_not_stopped(stop):
    (whole,) = [steps(loaders(stream_of(TEXTS)), 14)]
    before = loaders(stream_of(TEXTS), 2)
    steps(before, stop)
    states = [json.loads(json.dumps(loader.state_dict())) for loader in before]

    after = loaders(stream_of(TEXTS))
    after[0].load_state_dict(states[0])

    assert states[0] == states[1]
    assert steps(after, 14 - stop) == whole[stop:]
    assert after[0].tokens_seen == 14 * BATCH * LENGTH


def test_position_is_that_of_the_steps_taken_not_of_those_read_ahead():
    (loader,) = loaders(stream_of(TEXTS))
    ahead = loader.steps_from(0)
    read = [torch.cat([batch.input_ids for batch in next(ahead)]).tolist() for _ in range(9)]
    loader.pass_step()
    loader.pass_step()

    (resumed,) = loaders(stream_of(TEXTS))
    resumed.load_state_dict(loader.state_dict())

    assert steps([resumed], 7) == read[2:]


def test_rows_are_read_as_they_are_needed(tmp_path):
    rows = [json.dumps({"text": "abc" * 10})] * 3 + ["{"]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    (loader,) = loaders(StreamSource("a", stream_files([("a", tmp_path / "a.jsonl")], "text"), ByteTokenizer(), 4, 4))

    steps([loader], 5)

    with pytest.raises(ValueError, match=r"a\.jsonl, line 4 is not JSON"):
        steps([loader], 3)


def test_stream_without_end_is_read_in_part_only():
    endless = StreamSource("all", lambda start: (str(number) for number in count(start)), ByteTokenizer(), 4, 8)

    assert len(list(islice(loaders(endless)[0].steps_from(0), 3))) == 3


def test_stream_without_text_is_refused():
    with pytest.raises(ValueError, match="texts holds no row with text; add some, or set another"):
        loaders(stream_of(["", ""]))[0].next_step()


def test_stream_cannot_go_on_with_other_sizes():
    (loader,) = loaders(stream_of(TEXTS))
    (other,) = loaders(stream_of(TEXTS, at_a_time=7))

    with pytest.raises(ValueError, match=r"shuffled_at_a_time=7, but the checkpoint has 5 \(from data.shuffle_"):
        other.load_state_dict(loader.state_dict())
