"""Images in the cache and in batches: where their tokens are, cuts, changed files, and their order."""

import json
import os
import re
from collections import Counter

import numpy as np
import pytest
import torch
from nxd_data import (
    HeldOutLoader,
    TrainBatches,
    TrainLoader,
    build_conversations,
    cut_conversations,
    describe_conversations,
    image_folder,
    mix,
    open_conversations,
)
from nxd_data.chat import EncodedConversation, EncodedRow
from nxd_data.content_parts import source_of
from nxd_data.images import decode_image
from nxd_data.stored_images import EncodedImage
from PIL import Image

IMAGE, WORD, ANSWER = 7, 1, 2


class Letters:
    """An encoder of rows such as {"letters": "iwa", "images": [...]}: images of three tokens, words, and answers."""

    marks_answers, fingerprint = True, "letters"
    vocab_size, end_of_document = 10, 0

    def encode_row(self, place, row, files=None):
        tokens, images = [], []
        sources = iter(row.get("images", ()))
        for letter in row["letters"]:
            if letter == "i":
                content = files.read(source_of(place, next(sources)))
                size = decode_image(place, content.content).size
                images.append(EncodedImage(content, size, len(tokens), len(tokens) + 3))
            tokens += {"i": [IMAGE] * 3, "w": [WORD], "a": [ANSWER]}[letter]
        ids = np.array(tokens, dtype=np.int64)
        return EncodedRow([EncodedConversation(ids, ids == ANSWER, 0, images)])


class Colors:
    """A processor whose inputs are the top left colors of images, in order."""

    def token_types(self, input_ids, learned):
        return {"mm_token_type_ids": torch.tensor((input_ids == IMAGE).astype(np.int64))}

    def image_inputs(self, images, input_ids):
        colors = [image.getpixel((0, 0))[0] for row in images for image in row]
        return {"pixel_values": torch.tensor(colors)} if colors else {}

    def positions(self, input_ids, positions, starts, inputs):
        return {}


def _save(folder, color):
    Image.new("RGB", (4, 6), (color, 0, 0)).save(folder / f"{color}.png")
    return f"{color}.png"


@pytest.fixture
def make(tmp_path):
    """`make([("iwa", [1]), ...])`: conversations of these letters, with images of these colors."""
    folder = tmp_path / "data"
    folder.mkdir()

    def build(rows):
        lines = [
            json.dumps({"letters": letters, "images": [_save(folder, color) for color in colors]})
            for letters, colors in rows
        ]
        (folder / "chat.jsonl").write_text("\n".join(lines))
        return open_again()

    def open_again():
        entry = build_conversations(folder, Letters(), Letters(), cache_folder=tmp_path / "cache")
        return open_conversations(entry, image_folder(folder))

    build.folder, build.again = folder, open_again
    return build


def _colors(sequences, samples):
    return [[image.open().getpixel((0, 0))[0] for image in row] for row in sequences.images(np.array(samples))]


def test_images_of_samples_are_those_of_their_tokens(make):
    found = make([("wiwa", [3]), ("wa", []), ("iiwia", [4, 5, 3])])

    sequences, _, cuts = cut_conversations(found, sequence_length=20)

    [first] = sequences.images(np.array([0]))[0]
    assert (first.start, first.end, first.label) == (1, 4, "image 3.png 4x6")
    assert _colors(sequences, [2, 0, 1]) == [[4, 5, 3], [3], []]
    assert cuts.images_cut == 0
    assert found.index.num_images == 4
    assert len(found.images.distinct) == 3
    assert (found.images.about(0).width, found.images.about(0).height) == (4, 6)
    told = describe_conversations(sequences, cuts)
    assert "4 images (3 different ones) of 3 to 3 tokens" in told.notes


@pytest.mark.parametrize(
    ("letters", "length", "inputs", "colors"),
    [
        ("waiwa", 7, [WORD, ANSWER, IMAGE, IMAGE, IMAGE, WORD], [1]),  # fits
        ("waiwa", 5, [WORD, ANSWER, IMAGE, IMAGE, IMAGE], [1]),  # the token after the image is the last label
        ("waiwa", 4, [WORD], []),  # the image's last token would be a label alone
        ("waiwa", 3, [WORD], []),  # in the middle
        ("waiwa", 2, [WORD], []),  # its first token would be the last label
        ("waiiwa", 9, [WORD, ANSWER, *[IMAGE] * 6, WORD], [1, 2]),
        ("waiiwa", 7, [WORD], []),  # without the second image, the first one's last token would be a label alone
        ("waiwiwa", 8, [WORD, ANSWER, IMAGE, IMAGE, IMAGE], [1]),
        ("wai", 20, [WORD], []),  # ends with its image
    ],
)
def test_conversation_is_cut_before_an_image_that_does_not_fit(make, letters, length, inputs, colors):
    found = make([(letters, [1, 2][: letters.count("i")])])

    sequences, _, cuts = cut_conversations(found, sequence_length=length)
    rows, labels, _ = sequences.rows(np.array([0]))

    assert rows[0].tolist() == [*inputs, *[0] * (length - len(inputs))]
    assert IMAGE not in labels[labels != -100]
    assert _colors(sequences, [0]) == [colors]
    dropped = letters.count("i") - len(colors)
    assert (cuts.images_cut, cuts.num_cut_before_image) == (dropped, int(dropped > 0))
    warnings = describe_conversations(sequences, cuts).warnings
    assert any(re.match(rf"{dropped} images do not fit .*: 1 conversations are cut", it) for it in warnings) == (
        dropped > 0
    )


def test_conversation_that_begins_with_an_image_that_does_not_fit_is_left_out(make):
    found = make([("iwa", [1]), ("wa", [])])

    sequences, _, cuts = cut_conversations(found, sequence_length=2)

    assert len(sequences) == 1
    assert _colors(sequences, [0]) == [[]]
    assert cuts.num_without_answer == 1


def test_packed_images_are_in_the_order_of_their_documents(make):
    found = make([("iwa", [1]), ("wa", []), ("iiwa", [2, 3]), ("iwa", [4])])

    packed, _, _ = cut_conversations(found, sequence_length=12, packed=True)

    everything = np.arange(len(packed))
    rows, _, _ = packed.rows(everything)
    assert len(packed) < 4
    for row, images in zip(rows, packed.images(everything), strict=True):
        tokens = [token for image in images for token in range(image.start, image.end)]
        assert np.flatnonzero(row == IMAGE).tolist() == tokens
    assert sorted(color for row in _colors(packed, everything) for color in row) == [1, 2, 3, 4]


def test_images_of_mixed_sources_stay_with_their_rows(make):
    found = make([("iwa", [1]), ("wa", []), ("iiwa", [2, 3]), ("iwa", [4])])
    sequences, held_out, _ = cut_conversations(found, sequence_length=20, held_out_fraction=0.25)

    mixed = mix([held_out, sequences], [1, 1])

    rows, _, _ = mixed.rows(np.arange(len(mixed)))
    counts = [3 * len(colors) for colors in _colors(mixed, np.arange(len(mixed)))]
    assert (rows == IMAGE).sum(1).tolist() == counts
    assert sum(counts) > 0


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_images_of_a_step_do_not_depend_on_the_number_of_ranks(make, dp_size, accumulation):
    rows = [("i" * (number % 3) + "wa", [10 * number + it for it in range(number % 3)]) for number in range(10)]
    sequences, _, _ = cut_conversations(make(rows), sequence_length=10)

    def steps(size, parts):
        loaders = [
            TrainLoader(
                sequences,
                global_batch_size=8,
                gradient_accumulation_steps=parts,
                dp_rank=rank,
                dp_size=size,
                seed=1,
                image_processor=Colors(),
            )
            for rank in range(size)
        ]
        return [[loader.next_step() for loader in loaders] for _ in range(3)]

    for expected, found in zip(steps(1, 1), steps(dp_size, accumulation), strict=True):
        [[whole]] = expected
        batches = [batches[part] for part in range(accumulation) for batches in found]
        colors = [color for it in batches for color in it.images.get("pixel_values", torch.tensor([])).tolist()]
        assert colors == whole.images["pixel_values"].tolist()
        types = torch.cat([it.images["mm_token_type_ids"] for it in batches])
        torch.testing.assert_close(types, (whole.input_ids == IMAGE).long())


def test_steps_read_ahead_have_the_images_of_each_microbatch(make):
    rows = [("iwa", [1]), ("wa", []), ("wa", []), ("iiwa", [2, 3])]
    sequences, _, _ = cut_conversations(make(rows), sequence_length=10)
    loader = HeldOutLoader(
        sequences, num_batches=1, global_batch_size=4, gradient_accumulation_steps=4, image_processor=Colors()
    )
    training = TrainLoader(
        sequences, global_batch_size=4, gradient_accumulation_steps=4, seed=3, image_processor=Colors()
    )

    assert [batch.images.get("pixel_values", torch.tensor([])).tolist() for batch in loader] == [[1], [], [], [2, 3]]
    batches = TrainBatches(training)
    step = batches.next_step()
    batches.close()
    pixels = step.images["pixel_values"]
    assert [(row == IMAGE).sum().item() // 3 for row in step.input_ids] == [
        0 if of_row is None else len(of_row) for of_row in pixels
    ]
    assert Counter(len(it) for it in pixels if it is not None) == {1: 1, 2: 1}
    assert step.images["mm_token_type_ids"].shape == step.input_ids.shape


def test_resumed_loader_goes_on_with_the_same_images(make):
    rows = [("iwa", [number]) for number in range(20)]
    sequences, _, _ = cut_conversations(make(rows), sequence_length=10)

    def loader():
        return TrainLoader(sequences, global_batch_size=4, seed=5, image_processor=Colors())

    first = loader()
    first.next_step()
    state = first.state_dict()
    expected = [first.next_step()[0].images["pixel_values"] for _ in range(6)]
    second = loader()
    second.load_state_dict(state)

    for pixels in expected:
        torch.testing.assert_close(second.next_step()[0].images["pixel_values"], pixels, rtol=0, atol=0)


def test_model_without_a_processor_refuses_images(make):
    sequences, _, _ = cut_conversations(make([("iwa", [1])]), sequence_length=10)

    with pytest.raises(ValueError, match="the data have images, but the model takes none"):
        TrainLoader(sequences, global_batch_size=1).next_step()


def test_unchanged_images_use_the_same_entry(make):
    found = make([("iwa", [1]), ("iwa", [1])])

    os.utime(make.folder / "1.png")

    assert make.again().images.entry == found.images.entry


def test_changed_image_makes_another_entry(make):
    found = make([("iwa", [1]), ("iwa", [2])])
    Image.new("RGB", (9, 9), (77, 0, 0)).save(make.folder / "1.png")

    again = make.again()

    assert again.images.entry != found.images.entry
    assert again.index.digest != found.index.digest
    assert _colors(cut_conversations(again, sequence_length=10)[0], [0, 1]) == [[77], [2]]
    assert make.again().images.entry == again.images.entry


def test_image_that_changes_during_the_run_is_an_error(make):
    sequences, _, _ = cut_conversations(make([("iwa", [1])]), sequence_length=10)
    _save(make.folder, 2)
    (make.folder / "2.png").replace(make.folder / "1.png")

    with pytest.raises(ValueError, match=r"1\.png: the image has changed since it was tokenized; start again"):
        _colors(sequences, [0])


def test_image_that_vanishes_during_the_run_is_an_error(make):
    sequences, _, _ = cut_conversations(make([("iwa", [1])]), sequence_length=10)
    (make.folder / "1.png").unlink()

    with pytest.raises(ValueError, match=r"1\.png cannot be read: No such file"):
        _colors(sequences, [0])


def test_contents_in_rows_are_in_the_entry_once(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    Image.new("RGB", (4, 6), (5, 0, 0)).save(tmp_path / "5.png")
    content = (tmp_path / "5.png").read_bytes()
    images = [[{"bytes": content, "path": "x.png"}], [{"bytes": content, "path": None}]]
    parquet.write_table(pyarrow.table({"letters": ["iwa", "iwa"], "images": images}), tmp_path / "rows.parquet")

    entry = build_conversations([tmp_path / "rows.parquet"], Letters(), Letters(), cache_folder=tmp_path / "cache")
    found = open_conversations(entry)

    assert _colors(cut_conversations(found, sequence_length=10)[0], [0, 1]) == [[5], [5]]
    assert (entry / "images.bin").read_bytes() == content


def test_dataset_with_images_by_path_alone_is_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"letters": "iwa", "images": ["a.png"]}))

    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: the image has a path but no content"):
        build_conversations([file], Letters(), Letters(), cache_folder=tmp_path / "cache")


def test_damaged_list_of_images_says_so(make):
    found = make([("iwa", [1])])
    (found.images.entry / "images.jsonl").write_text("{")

    with pytest.raises(ValueError, match=r"is damaged.*delete it to rebuild it"):
        open_conversations(found.images.entry, make.folder)
