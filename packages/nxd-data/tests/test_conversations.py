"""Conversations as sequences: labels, padding, cuts, and what a step's loss is divided by."""

import json

import numpy as np
import pytest
from nxd_data import (
    ChatTemplate,
    HeldOutLoader,
    TrainLoader,
    build_conversations,
    cut_conversations,
    describe_conversations,
    load_tokenizer,
    open_conversations,
)

from .conftest import MARKED, UNMARKED


@pytest.fixture
def conversations(make_chat_tokenizer, tmp_path):
    """`conversations([2, 5])`: with answers of so many bytes, each after two tokens, and followed by <end>."""

    def make(lengths, template=MARKED, **of_answers):
        folder = make_chat_tokenizer(template)
        question = [{"role": "user", "content": ""}]
        answers = [{"role": "assistant", "content": "x" * length, **of_answers} for length in lengths]
        rows = [{"prompt": question, "completion": [answer]} for answer in answers]
        (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
        cache = tmp_path / "cache"
        tokenizer, chat = load_tokenizer(folder), ChatTemplate(folder)
        return open_conversations(build_conversations(tmp_path / "chat.jsonl", tokenizer, chat, cache_folder=cache))

    return make


def test_labels_are_the_next_tokens_that_the_assistant_says(conversations):
    found = conversations([3, 1])
    user, end, assistant, x, *_ = found.tokens.tolist()

    sequences, _, _ = cut_conversations(found, sequence_length=7)
    inputs, labels, positions = sequences.rows(np.array([1, 0]))

    pad = [end] * 2
    assert inputs.tolist() == [[user, end, assistant, x, *pad, *pad][:7], [user, end, assistant, x, x, x, end]]
    assert labels.tolist() == [[-100, -100, x, end, -100, -100, -100], [-100, -100, x, x, x, end, -100]]
    assert positions.tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0]]


def test_what_is_longer_than_a_sequence_is_cut_off_and_counted(conversations):
    found = conversations([1, 4, 9])

    sequences, _, cuts = cut_conversations(found, sequence_length=6)
    _, labels, _ = sequences.rows(np.arange(3))

    assert (labels != -100).sum(1).tolist() == [2, 4, 4]
    assert (cuts.num_cut, cuts.tokens_cut, cuts.learned_cut, cuts.num_without_answer) == (2, 7, 7, 0)
    assert sequences.count(np.array([0, 2])) == (6, 10)
    told = describe_conversations(sequences, cuts)
    assert told.notes == [
        "3 conversations of 26 tokens, of which the loss counts 17 (65.4%)",
        "3 sequences to train on, 11.1% of them padding",
    ]
    assert told.warnings == [
        "2 conversations are longer than data.sequence_length=6: 7 tokens are cut off, 7 of them in answers"
    ]


def test_conversation_without_a_token_to_learn_is_left_out_and_counted(conversations, tmp_path):
    found = conversations([5, 5])
    empty = np.array(found.learned)
    empty[: found.ends[0]] = False
    found = type(found)(found.tokens, empty, found.ends, found.index)

    sequences, _, cuts = cut_conversations(found, sequence_length=9)

    assert (len(sequences), cuts.num_without_answer) == (1, 1)
    warnings = describe_conversations(sequences, cuts).warnings
    assert warnings == ["left out: 1 conversations without a token that the loss counts"]
    with pytest.raises(ValueError, match=r"0 of 2 conversations have a token to learn within data\.sequence_length=2"):
        cut_conversations(found, sequence_length=2)


def test_template_without_generation_is_told(conversations):
    found = conversations([1], UNMARKED)
    sequences, _, cuts = cut_conversations(found, sequence_length=9)

    told = describe_conversations(sequences, cuts)

    assert "the chat template has no {% generation %} marks, which is fine" in told.notes[-1]
    assert told.warnings == []


def test_thoughts_that_the_template_leaves_out_are_told(conversations):
    found = conversations([1, 2], reasoning_content="why")
    sequences, _, cuts = cut_conversations(found, sequence_length=9)

    assert describe_conversations(sequences, cuts).warnings == [
        "the chat template omits the thoughts of 2 learned answers, in 2 rows; to train on them, end a "
        "conversation at each such answer, or give the tokenizer a template that keeps them"
    ]


def test_held_out_conversations_are_spread_evenly_and_not_trained_on(conversations):
    found = conversations(range(1, 13))

    train, held_out, _ = cut_conversations(found, sequence_length=32, held_out_fraction=0.25)

    assert (held_out.learned - 1).tolist() == [4, 8, 12]
    assert (train.learned - 1).tolist() == [1, 2, 3, 5, 6, 7, 9, 10, 11]
    with pytest.raises(ValueError, match=r"1 of 1 conversations .* set data\.held_out_fraction=0 "):
        cut_conversations(conversations([1]), sequence_length=32, held_out_fraction=0.1)


@pytest.mark.parametrize(("accumulation", "dp_size"), [(1, 1), (3, 1), (1, 2), (2, 3)])
def test_microbatches_of_all_ranks_share_what_the_loss_is_divided_by(conversations, accumulation, dp_size):
    train, held_out, _ = cut_conversations(conversations(range(1, 21)), sequence_length=32, held_out_fraction=0.3)
    layout = {"global_batch_size": 6, "gradient_accumulation_steps": accumulation, "dp_size": dp_size}
    ranks = [TrainLoader(train, dp_rank=rank, **layout) for rank in range(dp_size)]

    for _ in range(5):
        batches = [batch for loader in ranks for batch in loader.next_step()]
        learned = sum(int((batch.labels != -100).sum()) for batch in batches)
        assert {tuple(batch.normalizer.tolist()) for batch in batches} == {(learned, accumulation * dp_size)}

    evaluations = [HeldOutLoader(held_out, num_batches=1, dp_rank=rank, **layout) for rank in range(dp_size)]
    batches = [batch for loader in evaluations for batch in loader]
    learned = sum(int((batch.labels != -100).sum()) for batch in batches)
    assert {tuple(batch.normalizer.tolist()) for batch in batches} == {(learned, accumulation * dp_size)}


def test_loader_counts_tokens_learned_and_seen_and_resumes_with_them(conversations):
    train, _, _ = cut_conversations(conversations([1, 2, 3, 4, 5]), sequence_length=32)
    loader = TrainLoader(train, global_batch_size=2)

    batches = [batch for _ in range(4) for batch in loader.next_step()]

    learned = sum(int((batch.labels != -100).sum()) for batch in batches)
    assert (loader.tokens_learned, loader.tokens_seen) == (learned, learned + 8 * 2)  # two more tokens in each
    resumed = TrainLoader(train, global_batch_size=2)
    resumed.load_state_dict(loader.state_dict())
    assert (resumed.tokens_learned, resumed.tokens_seen) == (loader.tokens_learned, loader.tokens_seen)
    assert resumed.next_step()[0].input_ids.tolist() == loader.next_step()[0].input_ids.tolist()


def test_state_of_an_older_loader_counts_every_token(numbered):
    loader = TrainLoader(numbered(50)[0], global_batch_size=6)
    loader.next_step()
    state = {name: value for name, value in loader.state_dict().items() if not name.startswith("tokens")}

    resumed = TrainLoader(numbered(50)[0], global_batch_size=6)
    resumed.load_state_dict(state)

    assert (resumed.tokens_learned, resumed.tokens_seen) == (24, 24) == (loader.tokens_learned, loader.tokens_seen)


def test_same_conversations_are_tokenised_once_and_others_are_other_data(conversations, tmp_path):
    first, again = conversations([1, 2]).index, conversations([1, 2]).index
    entries = len(list((tmp_path / "cache").iterdir()))
    unmarked, longer = conversations([1, 2], UNMARKED).index, conversations([1, 3]).index

    assert first == again
    assert entries == 1
    assert unmarked.digest == first.digest  # the same tokens, of which the same are learned
    assert longer.digest != first.digest


def test_damaged_entry_says_to_delete_it(conversations, tmp_path):
    conversations([1, 2])
    [entry] = (tmp_path / "cache").iterdir()
    (entry / "tokens.bin").write_bytes(b"1234")

    with pytest.raises(ValueError, match=r"is damaged: .*; delete it to rebuild it"):
        open_conversations(entry)


def test_token_that_the_model_does_not_know_is_refused(make_chat_tokenizer, tmp_path):
    folder = make_chat_tokenizer(MARKED)
    (tmp_path / "chat.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    tokenizer = load_tokenizer(folder)
    tokenizer.vocab_size = 4

    with pytest.raises(ValueError, match=r"chat\.jsonl, line 1 has token \d+, but the tokenizer has 4 ids"):
        build_conversations(tmp_path / "chat.jsonl", tokenizer, ChatTemplate(folder), cache_folder=tmp_path / "cache")


def test_files_without_a_row_hold_no_conversation(make_chat_tokenizer, tmp_path):
    folder = make_chat_tokenizer(MARKED)
    (tmp_path / "chat.jsonl").write_text("\n")

    with pytest.raises(ValueError, match=r"chat\.jsonl holds no conversations"):
        build_conversations(
            tmp_path / "chat.jsonl", load_tokenizer(folder), ChatTemplate(folder), cache_folder=tmp_path / "cache"
        )


def documents_of(sequences):
    """The inputs, labels and positions of each document, and of each part that fills up."""
    found = []
    for inputs, labels, positions in zip(
        *map(np.ndarray.tolist, sequences.rows(np.arange(len(sequences)))), strict=True
    ):
        starts = [at for at, position in enumerate(positions) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(positions)], strict=True):
            found.append((inputs[start:end], labels[start:end], positions[start:end]))
    return found


def test_packed_sequences_hold_each_conversation_once_with_positions_of_its_own(conversations):
    found = conversations([1, 9, 2, 5, 3, 3, 1])  # of the answers; inputs are three more

    apart, _, _ = cut_conversations(found, sequence_length=12)
    packed, _, cuts = cut_conversations(found, sequence_length=12, packed=True)

    learned = [document for document in documents_of(packed) if max(document[1]) >= 0]
    assert sorted(learned) == sorted(document for document in documents_of(apart) if max(document[1]) >= 0)
    assert [positions for *_, positions in learned] == [list(range(len(inputs))) for inputs, *_ in learned]
    assert packed.count(np.arange(len(packed))) == apart.count(np.arange(len(apart))) == (31, 45)
    for sequences in (packed, apart):
        (batch,) = TrainLoader(sequences, global_batch_size=len(sequences)).next_step()
        assert int(batch.is_token.sum()) == 45  # what routers' statistics count
    assert len(packed) == 4  # 12, 8 + 4, 6 + 6 and 5 + 4
    assert describe_conversations(packed, cuts).notes[1] == "4 sequences to train on, 6.2% of them padding"
    assert describe_conversations(apart, cuts).notes[1] == "7 sequences to train on, 46.4% of them padding"
