"""Previews a run's data: the first samples, decoded and colored, document lengths, and the savings from packing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray
from nxd_data import Conversations, Corpus, Sequences, Tokenizer, cut_conversations
from nxd_data.loader import shuffled
from nxd_data.sequences import SampleImage
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nxd_trainer.report.thumbnails import thumbnail

NUM_SAMPLES = 3
MAX_SHOWN = 600  # tokens of a document
BAR_WIDTH = 40
LEARNED, MASKED, BORDER, IMAGE, WARNING = "bold green", "dim", "blue", "magenta", "bold yellow"
BRACKETS = ("⟦", "⟧")  # around learned text, without colors
# Data could otherwise steer the terminal.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def show_samples(console: Console, sequences: Sequences, tokenizer: Tokenizer, *, seed: int) -> None:
    """Print the first samples of a run, with the tokens that the loss counts in a different color."""
    console.print(
        Text("learned", LEARNED)
        + Text(" masked ", MASKED)
        + Text("document border", BORDER)
        + Text("" if _has_colors(console) else f"; learned: {BRACKETS[0]}...{BRACKETS[1]}")
    )
    first = np.arange(min(NUM_SAMPLES, len(sequences)))
    for number, sample in enumerate(shuffled(first, len(sequences), seed=seed, epoch=0)):
        console.print()
        _show_sample(console, f"sample {number + 1}", sequences, sample, tokenizer)


def show_held_out_sample(console: Console, held_out: Sequences, tokenizer: Tokenizer) -> None:
    """Print the first held-out sample, as `show_samples` does."""
    _show_sample(console, f"held-out sample 1 of {len(held_out):,}", held_out, 0, tokenizer)


def _show_sample(console: Console, title: str, sequences: Sequences, sample: int, tokenizer: Tokenizer) -> None:
    inputs, labels, positions = (row[0] for row in sequences.rows(np.array([sample])))
    learned, seen = sequences.count(np.array([sample]))
    console.print(
        f"{title}: {seen} tokens, {learned} learned, {sequences.sequence_length - seen} padding", style="bold"
    )
    [images] = sequences.images(np.array([sample]))
    starts = [*np.flatnonzero(positions[:seen] == 0).tolist(), seen]
    for document, (start, end) in enumerate(pairwise(starts)):
        if document:
            console.print(Text(f"--- document {document + 1} ---", BORDER))
        here = [replace(it, start=it.start - start, end=it.end - start) for it in images if start <= it.start < end]
        shown = _document(inputs[start:end], labels[start:end], here, tokenizer, has_colors=_has_colors(console))
        console.print(shown)
        if _has_colors(console):  # without, a picture would be a block of equal characters
            for image in here:
                console.print(Text(image.label.translate(_CONTROLS), IMAGE))
                console.print(thumbnail(image.open()))


def _has_colors(console: Console) -> bool:
    return console.color_system is not None


def _document(
    inputs: NDArray[np.int64],
    labels: NDArray[np.int64],
    images: Sequence[SampleImage],
    tokenizer: Tokenizer,
    *,
    has_colors: bool,
) -> Text:
    """Return the text of inputs `[tokens]` and the last label; tokens that are labels of the loss are colored.

    An image is a line about it in brackets, in the place of its tokens.
    """
    is_learned = np.concatenate([[False], labels >= 0])
    tokens = np.append(inputs, max(int(labels[-1]), 0))[: len(is_learned) - (not is_learned[-1])]
    image_of = np.zeros(len(tokens), dtype=np.int64)  # for each token, the number of its image, from 1
    for number, image in enumerate(images, start=1):
        image_of[image.start : image.end] = number
    text, room = Text(), MAX_SHOWN
    each = zip(image_of.tolist(), is_learned[: len(tokens)].tolist(), tokens.tolist(), strict=True)
    for (number, learned), part in groupby(each, key=lambda it: it[:2]):
        if number and room:
            image = images[number - 1]
            text.append(f"[{image.label.translate(_CONTROLS)}: {image.end - image.start} tokens]", IMAGE)
            continue
        ids = [] if number else [token for *_, token in part][:room]
        room -= len(ids)
        decoded = tokenizer.decode(ids, skip_special_tokens=False).translate(_CONTROLS)
        if learned and ids and not has_colors:
            decoded = decoded.join(BRACKETS)
        for piece, style in _with_borders(decoded, tokenizer, LEARNED if learned else MASKED):
            text.append(piece, style)
    rest = int((image_of == 0).sum()) - (MAX_SHOWN - room)
    if rest:
        text.append(f" ... {rest} more tokens", BORDER)
    return text


def _with_borders(decoded: str, tokenizer: Tokenizer, style: str) -> Iterator[tuple[str, str]]:
    border = tokenizer.decode([tokenizer.end_of_document], skip_special_tokens=False)
    for number, piece in enumerate(decoded.split(border) if border else [decoded]):
        if number:
            yield border, BORDER if style == MASKED else f"{style} underline"
        yield piece, style


def show_lengths(console: Console, source: Corpus | Conversations, *, sequence_length: int) -> None:
    """Print a histogram of a source's document lengths over powers of two."""
    lengths = document_lengths(source)
    bins = np.maximum(lengths, 1).astype(np.float64)
    counts = np.bincount(np.floor(np.log2(bins)).astype(int))
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(justify="right")
    table.add_column()
    table.add_column(justify="right")
    first = int(np.flatnonzero(counts)[0])
    for power in range(first, len(counts)):
        width = round(BAR_WIDTH * int(counts[power]) / int(counts.max()))
        name = f"{2**power:,}-{2 ** (power + 1) - 1:,}" if power else "0-1"
        table.add_row(name, "█" * width, f"{counts[power]:,}")
    kind = "conversations" if isinstance(source, Conversations) else "documents"
    longer = int((lengths > sequence_length + 1).sum())
    console.print(
        f"{len(lengths):,} {kind}, tokens of each: mean {lengths.mean():,.1f}, longest {lengths.max():,}, "
        f"longer than data.sequence_length={sequence_length}: {longer:,}"
    )
    console.print(table)


def document_lengths(source: Corpus | Conversations) -> NDArray[np.int64]:
    """Return the tokens of each document, including its end token, or of each conversation: `[documents]`."""
    if isinstance(source, Conversations):
        return np.diff(source.ends, prepend=0)
    ends = np.flatnonzero(source.tokens == source.index.end_of_document) + 1
    if not len(ends) or ends[-1] < len(source.tokens):
        ends = np.append(ends, len(source.tokens))
    return np.diff(ends, prepend=0)


def packing_line(conversations: Conversations, *, sequence_length: int) -> str:
    """Return a line about the savings from packing."""
    apart, packed = (
        cut_conversations(conversations, sequence_length=sequence_length, packed=packed)[0] for packed in (False, True)
    )
    _, seen = apart.count(np.arange(len(apart)))
    padding = [1 - seen / (len(sequences) * sequence_length) for sequences in (apart, packed)]
    return (
        f"packing: {len(packed):,} sequences instead of {len(apart):,}, {padding[1]:.1%} padding instead of "
        f"{padding[0]:.1%} (data.packing=true)"
    )


def special_tokens_line(corpus: Corpus, tokenizer: Tokenizer) -> str | None:
    """Return a line about texts that spell a special token, and so become it; None if there are none."""
    special = [*tokenizer.special_ids, tokenizer.end_of_document]
    found, counts = np.unique(corpus.tokens[np.isin(corpus.tokens, special)], return_counts=True)
    ours = Counter([*tokenizer.prefix, tokenizer.end_of_document])  # of each document
    spelled = {
        token: count - ours[token] * corpus.index.num_documents
        for token, count in zip(found.tolist(), counts.tolist(), strict=True)
    }
    spelled = {token: count for token, count in spelled.items() if count > 0}
    if not spelled:
        return None
    shown = tokenizer.decode([next(iter(spelled))], skip_special_tokens=False)
    return (
        f"{sum(spelled.values()):,} times text spells a special token, such as {shown!r}, and is learned as that "
        "token; remove it from the text unless this is intended"
    )
