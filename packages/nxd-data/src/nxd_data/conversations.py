"""Tokenized conversations on disk, and sequences of them: one per sequence or several packed, padded or truncated.

The cache holds whole conversations; the sequence length is chosen when they are opened. `chat.py` makes the tokens.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nxd_data.chat import RowEncoder
from nxd_data.corpus import make_entry
from nxd_data.image_tokens import check_num_images
from nxd_data.sequences import NOT_LEARNED, SampleImage
from nxd_data.sources import TABLE_SUFFIXES, SourceFile, find_tables, scan_files
from nxd_data.stored_images import ImageFiles, ImageWriter, StoredImages, changed_images, open_images
from nxd_data.tables import read_rows
from nxd_data.tokenizer import Tokenizer

FORMAT = 4
INDEX_FILE = "index.json"
TOKENS_FILE = "tokens.bin"
LEARNED_FILE = "learned.bin"
ENDS_FILE = "ends.bin"


@dataclass(frozen=True, kw_only=True)
class ConversationsIndex:
    """The metadata of tokenized conversations."""

    digest: str  # of the tokens and the learned mask
    num_conversations: int
    num_tokens: int
    marks_answers: bool  # whether the chat template marks answers
    num_with_special_token: int  # conversations that spell a special token
    special_token: str | None  # an example
    num_lost_thoughts: int  # answers whose thoughts the chat template omits
    num_with_lost_thoughts: int  # rows with such an answer
    padding: int  # id of the padding token
    num_images: int = 0  # images in all conversations


@dataclass(frozen=True)
class Conversations:
    """Tokenized conversations, concatenated and memory-mapped."""

    tokens: NDArray[np.uint32]  # `[num_tokens]` uint32
    learned: NDArray[np.bool_]  # `[num_tokens]` bool, true for the assistant's tokens
    ends: NDArray[np.int64]  # `[num_conversations]` end of each conversation in the tokens
    index: ConversationsIndex  # metadata
    images: StoredImages | None = None  # their images; None if they have none


def build_conversations(
    path: str | Path | Sequence[Path] | None,
    tokenizer: Tokenizer,
    encoder: RowEncoder,
    *,
    cache_folder: str | Path,
    suffixes: Sequence[str] | None = None,
) -> Path:
    """Tokenize conversations, unless they are cached, and return the entry for `open_conversations`.

    An entry whose images have changed is left alone, and a new one is made beside it.

    Args:
        path, suffixes: files to read, as for `find_tables`.
        tokenizer: the tokenizer whose vocabulary the model uses.
        encoder: encoder of rows.
        cache_folder: folder of the cache; created if missing.

    Raises:
        ValueError: there are no files, or a row cannot be read, is not a conversation, or does not fit the template.
    """
    files = scan_files(find_tables(path, suffixes=suffixes or TABLE_SUFFIXES))
    content = [FORMAT, encoder.fingerprint, tokenizer.vocab_size, [(it.name, it.digest) for it in files]]
    images = image_folder(path)

    def make(*further: object) -> Path:
        name = hashlib.sha256(json.dumps(["chat", *content, *further]).encode()).hexdigest()[:32]
        return make_entry(Path(cache_folder), name, lambda folder: _write(folder, files, tokenizer, encoder, images))

    entry = make()
    changed = changed_images(entry, images)
    return make(changed) if changed else entry


def image_folder(path: str | Path | Sequence[Path] | None) -> Path | None:
    """Return the folder that images by path must be in; None if there is none. `path` is as for `find_tables`."""
    if not isinstance(path, (str, Path)):
        return None
    return Path(path) if Path(path).is_dir() else Path(path).parent


def _write(
    folder: Path,
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    encoder: RowEncoder,
    data_folder: Path | None,
) -> None:
    writer, num_images = ImageWriter(folder, data_folder), 0
    digest, ends, spelled = hashlib.sha256(), [0], Counter[str]()
    lost_thoughts: list[int] = []  # for each row that loses some
    with (folder / TOKENS_FILE).open("wb") as tokens_file, (folder / LEARNED_FILE).open("wb") as learned_file:
        for file in files:
            image_files = ImageFiles(file.path, data_folder)
            for place, row in read_rows(file.path):
                encoded = encoder.encode_row(place, row, image_files)
                if encoded.special_token is not None:
                    spelled[encoded.special_token] += 1
                if lost := sum(it.num_lost_thoughts for it in encoded.samples):
                    lost_thoughts.append(lost)
                for tokens, learned, _, images in encoded.samples:
                    if len(tokens) and tokens.max() >= tokenizer.vocab_size:
                        raise ValueError(
                            f"{place} has token {tokens.max()}, but the tokenizer has {tokenizer.vocab_size} ids; "
                            "its files do not belong together"
                        )
                    for stream, part in ((tokens_file, tokens.astype(np.uint32)), (learned_file, learned)):
                        stream.write(part.tobytes())
                        digest.update(part.tobytes())
                    for image in images:
                        writer.add(image, ends[-1])
                        digest.update(image.source.digest.encode())
                    num_images += len(images)
                    ends.append(ends[-1] + len(tokens))
    writer.finish()
    if not ends[-1]:
        raise ValueError(f"{files[0].path} holds no conversations; set data.path to files that do")
    np.asarray(ends[1:], dtype=np.int64).tofile(folder / ENDS_FILE)
    index = ConversationsIndex(
        digest=digest.hexdigest()[:32],
        num_conversations=len(ends) - 1,
        num_tokens=ends[-1],
        marks_answers=encoder.marks_answers,
        num_with_special_token=spelled.total(),
        special_token=next(iter(spelled), None),
        num_lost_thoughts=sum(lost_thoughts),
        num_with_lost_thoughts=len(lost_thoughts),
        padding=tokenizer.end_of_document,
        num_images=num_images,
    )
    (folder / INDEX_FILE).write_text(json.dumps(asdict(index), indent=2) + "\n", encoding="utf-8")


def open_conversations(entry: str | Path, data_folder: Path | None = None) -> Conversations:
    """Memory-map a cache entry that `build_conversations` returned, in this or another process.

    Args:
        entry: the entry.
        data_folder: the `image_folder` of the data; needed for images by path.

    Raises:
        ValueError: the entry is missing or damaged.
    """
    entry = Path(entry)
    try:
        index = ConversationsIndex(**json.loads((entry / INDEX_FILE).read_text(encoding="utf-8")))
        return Conversations(
            np.memmap(entry / TOKENS_FILE, dtype=np.uint32, mode="r", shape=(index.num_tokens,)),
            np.memmap(entry / LEARNED_FILE, dtype=np.bool_, mode="r", shape=(index.num_tokens,)),
            np.memmap(entry / ENDS_FILE, dtype=np.int64, mode="r", shape=(index.num_conversations,)),
            index,
            open_images(entry, data_folder),
        )
    except (OSError, TypeError, ValueError) as error:  # numpy raises ValueError for a truncated file
        raise ValueError(f"token cache entry {entry} is damaged: {error}; delete it to rebuild it") from error


@dataclass(frozen=True)
class ConversationSequences:
    """Sequences of one or more conversations, numbered from 0."""

    conversations: Conversations  # all conversations
    sequence_length: int  # tokens per sequence, without the last label
    starts: NDArray[np.int64]  # `[conversations here]` start of each in the tokens; those of a sequence are adjacent
    # `[conversations here]` tokens of each, at most `sequence_length + 1`; the last is only a label
    lengths: NDArray[np.int64]
    learned: NDArray[np.int64]  # `[conversations here]` labels that the loss counts
    bounds: NDArray[np.int64]  # `[samples + 1]` sample i has the conversations from `bounds[i]` to `bounds[i + 1]`

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def rows(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return samples `[count]` as inputs, labels and positions, each `[count, sequence_length]`, padded at the end.

        Positions start from 0 in each conversation, and in the padding.
        """
        shape = (len(samples), self.sequence_length)
        inputs = np.full(shape, self.conversations.index.padding, dtype=np.int64)
        labels = np.full(shape, NOT_LEARNED, dtype=np.int64)
        positions = np.empty(shape, dtype=np.int64)
        for row, sample in enumerate(samples):
            at = 0
            for index in range(int(self.bounds[sample]), int(self.bounds[sample + 1])):
                start, end = int(self.starts[index]), int(self.starts[index] + self.lengths[index])
                here = slice(at, at + end - start - 1)
                tokens = self.conversations.tokens[start:end].astype(np.int64)
                inputs[row, here] = tokens[:-1]
                labels[row, here] = np.where(self.conversations.learned[start + 1 : end], tokens[1:], NOT_LEARNED)
                positions[row, here] = np.arange(end - start - 1)
                at = here.stop
            positions[row, at:] = np.arange(self.sequence_length - at)
        return inputs, labels, positions

    def images(self, samples: NDArray[np.int64]) -> list[list[SampleImage]]:
        """Return the images of samples `[count]`, each a list in the order of the tokens."""
        return [self._images_of(int(sample)) for sample in samples]

    def _images_of(self, sample: int) -> list[SampleImage]:
        stored, found, at = self.conversations.images, list[SampleImage](), 0
        if stored is None:
            return found
        for index in range(int(self.bounds[sample]), int(self.bounds[sample + 1])):
            start, length = int(self.starts[index]), int(self.lengths[index]) - 1
            for number in stored.within(start, start + length):
                first, end = (int(bounds[number]) - start + at for bounds in (stored.starts, stored.ends))
                found.append(SampleImage(first, end, stored.about(number).label, partial(stored.open, number)))
            at += length
        return found

    def count(self, samples: NDArray[np.int64]) -> tuple[int, int]:
        """Count the labels in the loss, and the tokens without padding, of samples `[count]` together."""
        chosen = [slice(*self.bounds[sample : sample + 2]) for sample in samples]
        learned = sum(int(self.learned[here].sum()) for here in chosen)
        return learned, sum(int((self.lengths[here] - 1).sum()) for here in chosen)


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """The effects of truncating conversations to the sequence length."""

    num_cut: int  # conversations that are longer
    tokens_cut: int  # tokens cut off
    learned_cut: int  # the assistant's tokens among them
    num_without_answer: int  # conversations left out because the loss would count none of their tokens
    images_cut: int = 0  # images that do not fit
    num_cut_before_image: int = 0  # conversations cut before such an image


def cut_conversations(
    conversations: Conversations, *, sequence_length: int, held_out_fraction: float = 0.0, packed: bool = False
) -> tuple[ConversationSequences, ConversationSequences, Cuts]:
    """Return conversations to train on, evenly spaced held-out ones, and the effects of truncation.

    With a fraction above 0 both parts have at least one. With `packed` a sequence holds as many as fit: longest first,
    each where it leaves the least room.

    Raises:
        ValueError: there are too few conversations with a token to learn.
    """
    ends = np.asarray(conversations.ends)
    starts, lengths, learned = cut_lengths(conversations, sequence_length)
    cut = lengths < ends - starts
    kept = np.flatnonzero(learned)
    images_cut = _count_cut_images(conversations, starts, lengths)
    if images_cut:
        _check_images_fit(conversations, sequence_length, len(kept), least=2 if held_out_fraction > 0 else 1)
    is_held_out = spread_held_out(len(kept), len(ends), sequence_length, held_out_fraction, "conversations")

    def part(chosen: NDArray[np.int64]) -> ConversationSequences:
        bounds = np.arange(len(chosen) + 1)
        if packed:
            order, bounds = _pack(lengths[chosen] - 1, sequence_length)
            chosen = chosen[order]
        return ConversationSequences(
            conversations, sequence_length, starts[chosen], lengths[chosen], learned[chosen], bounds
        )

    cuts = Cuts(
        num_cut=int(cut.sum()),
        tokens_cut=int((ends - starts - lengths).sum()),
        learned_cut=int(
            sum(conversations.learned[starts[it] + lengths[it] : ends[it]].sum() for it in np.flatnonzero(cut))
        ),
        num_without_answer=len(ends) - len(kept),
        images_cut=images_cut,
        num_cut_before_image=int((lengths < np.minimum(ends - starts, sequence_length + 1)).sum()),
    )
    return part(kept[~is_held_out]), part(kept[is_held_out]), cuts


def _check_images_fit(conversations: Conversations, sequence_length: int, num_kept: int, *, least: int) -> None:
    """Raise ValueError if the images of a conversation cannot all fit, or too few conversations keep an answer."""
    images, ends = conversations.images, np.asarray(conversations.ends)
    assert images is not None
    per_conversation = np.bincount(np.searchsorted(ends, images.starts, side="right"))
    check_num_images("a conversation", int(per_conversation.max()), sequence_length)
    all_learned = np.flatnonzero(conversations.learned)
    starts = np.concatenate([[0], ends[:-1]])
    first = np.searchsorted(all_learned, starts + 1)  # the first token of a conversation is no label
    has_answer = first < np.searchsorted(all_learned, ends)
    needed = np.sort(all_learned[first[has_answer]] - starts[has_answer])  # to reach the first label of each
    if num_kept < least <= len(needed):
        tokens = images.ends - images.starts
        each = f"{tokens.min():,}" if tokens.min() == tokens.max() else f"{tokens.min():,} to {tokens.max():,}"
        raise ValueError(
            f"{num_kept} of {len(ends)} conversations have a token to learn within data.sequence_length="
            f"{sequence_length}, as an image takes {each} tokens and a conversation is cut before one that does not "
            f"fit; set data.sequence_length={needed[least - 1]} or more, or use smaller images"
        )


def _count_cut_images(conversations: Conversations, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
    images = conversations.images
    if images is None:
        return 0
    owners = np.searchsorted(conversations.ends, images.starts, side="right")
    return int((images.ends - starts[owners] >= lengths[owners]).sum())


def cut_lengths(
    conversations: Conversations, sequence_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return each conversation's start, its tokens within the length, and how many of their labels the loss counts.

    A conversation is cut before the first image whose tokens do not all fit into the inputs.
    """
    ends = np.asarray(conversations.ends)
    starts = np.concatenate([[0], ends[:-1]])
    lengths = np.minimum(ends - starts, sequence_length + 1)
    if (images := conversations.images) is not None:
        owners = np.searchsorted(ends, images.starts, side="right")
        firsts, lasts = images.starts - starts[owners], images.ends - starts[owners]
        too_long = np.isin(owners, owners[lasts >= lengths[owners]])
        # The last token is only a label. Backwards: where one image is left out, the one before it may be the last.
        for number in np.flatnonzero(too_long)[::-1]:
            owner = owners[number]
            if firsts[number] < lengths[owner] <= lasts[number]:
                lengths[owner] = firsts[number]
    before = np.concatenate([[0], np.cumsum(conversations.learned, dtype=np.int64)])  # learned before each token
    return starts, lengths, before[starts + lengths] - before[np.minimum(starts + 1, starts + lengths)]


def spread_held_out(num_kept: int, num_all: int, sequence_length: int, fraction: float, what: str) -> NDArray[np.bool_]:
    """Mark evenly spaced samples as held out, `[num_kept]`; at least one if the fraction is above 0.

    Raises:
        ValueError: there are too few samples.
    """
    least = 2 if fraction > 0 else 1
    if 0 < num_kept < least:
        raise ValueError(
            f"only 1 of {num_all} {what} has a token to learn, but data.held_out_fraction={fraction} needs one more "
            "for evaluation; set data.held_out_fraction=0 (and train.eval_every=0), or data.evaluation_path"
        )
    if num_kept < least:
        raise ValueError(
            f"{num_kept} of {num_all} {what} have a token to learn within data.sequence_length={sequence_length}, but "
            f"data.held_out_fraction={fraction} needs {least}; raise the length, or give {what} with answers"
        )
    num_held_out = min(max(round(num_kept * fraction), least - 1), num_kept - 1)
    return np.diff(np.arange(num_kept + 1) * num_held_out // num_kept) > 0


def _pack(sizes: NDArray[np.int64], room: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack by best-fit decreasing: an order of `[items]`, and `[bins + 1]` bounds of the bins in it."""
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # room left and number, sorted
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        at = bisect_left(open_bins, (size, -1))
        if at == len(open_bins):
            left, number = room, len(bins)
            bins.append([])
        else:
            left, number = open_bins.pop(at)
        bins[number].append(item)
        insort(open_bins, (left - size, number))
    order = np.array([item for items in bins for item in items], dtype=np.int64)
    return order, np.cumsum([0, *map(len, bins)])


@dataclass(frozen=True)
class Description:
    """Lines about conversations: notes, and warnings of probable mistakes."""

    notes: list[str]
    warnings: list[str]


def describe_conversations(train: ConversationSequences, cuts: Cuts) -> Description:
    """Describe conversations before training."""
    conversations, sequence_length = train.conversations, train.sequence_length
    index, num_learned = conversations.index, int(np.count_nonzero(conversations.learned))
    notes = [
        f"{index.num_conversations:,} conversations of {index.num_tokens:,} tokens, of which the loss counts "
        f"{num_learned:,} ({num_learned / max(1, index.num_tokens):.1%})"
    ]
    _, seen = train.count(np.arange(len(train)))
    notes.append(
        f"{len(train):,} sequences to train on, {1 - seen / (len(train) * sequence_length):.1%} of them padding"
    )
    if (images := conversations.images) is not None:
        lengths = images.ends - images.starts
        notes.append(
            f"{index.num_images:,} images ({len(images.distinct):,} different ones) of {lengths.min():,} to "
            f"{lengths.max():,} tokens"
        )
    if not index.marks_answers:
        notes.append(
            "the chat template has no {% generation %} marks, which is fine: the loss counts what it writes "
            "for each turn of the assistant; `nxd data` shows these tokens"
        )
    warnings = []
    if index.num_with_special_token:
        warnings.append(
            f"{index.num_with_special_token:,} conversations spell a special token in their text, such as "
            f"{index.special_token!r}, which becomes that token; remove it from the text unless this is intended"
        )
    warnings += warnings_of_thoughts(index)
    if cuts.num_cut:
        warnings.append(
            f"{cuts.num_cut:,} conversations are longer than data.sequence_length={sequence_length}: "
            f"{cuts.tokens_cut:,} tokens are cut off, {cuts.learned_cut:,} of them in answers"
        )
    if cuts.images_cut:
        warnings.append(
            f"{cuts.images_cut:,} images do not fit into data.sequence_length={sequence_length}: "
            f"{cuts.num_cut_before_image:,} conversations are cut before one"
        )
    if cuts.num_without_answer:
        warnings.append(f"left out: {cuts.num_without_answer:,} conversations without a token that the loss counts")
    return Description(notes, warnings)


def warnings_of_thoughts(index: ConversationsIndex) -> list[str]:
    """Warn about thoughts that are not in the tokens."""
    if not index.num_lost_thoughts:
        return []
    return [
        f"the chat template omits the thoughts of {index.num_lost_thoughts:,} learned answers, in "
        f"{index.num_with_lost_thoughts:,} rows; to train on them, end a conversation at each such answer, or give the "
        "tokenizer a template that keeps them"
    ]
