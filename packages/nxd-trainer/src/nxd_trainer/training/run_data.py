"""The data of a run: a recipe's sources, tokenized into the cache once and opened by every rank.

`prepare_data` writes and is called once per host; `open_data` reads. Neither communicates.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from nxd_data import (
    ChatTemplate,
    Conversations,
    Corpus,
    PreferenceEncoder,
    Sequences,
    StreamSource,
    TokenRows,
    build_conversations,
    build_corpus,
    cut_conversations,
    cut_preferences,
    describe_conversations,
    files_left_out,
    find_tables,
    hub_files,
    image_folder,
    mix,
    open_conversations,
    open_corpus,
    pack_corpus,
    read_weights,
    stream_files,
    stream_hub,
)
from nxd_data.sources import TABLE_SUFFIXES

from nxd_trainer.from_recipe import tokenizer_of
from nxd_trainer.recipe import Recipe, RecipeError
from nxd_trainer.recipe.rules import consistency_mistakes


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data source in the cache."""

    name: str  # path, or name on the hub
    entry: Path  # folder in the cache
    folder: Path | None = None  # folder that images by path are in; None if there is none
    weight: float = 1.0  # share of the samples, relative to the sum of all weights
    left_out: str | None = None  # a line about skipped files; None if there are none


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """The output of `prepare_data`: sources to train on, and one to evaluate on if the recipe names it.

    There are no sources to train on if the training data are streamed.
    """

    sources: Sequence[Source]
    evaluation: Source | None


@dataclass(frozen=True)
class RunData:
    """The data of a run."""

    train: Sequences  # sequences to train on; empty with a stream
    held_out: Sequences  # sequences to evaluate on
    digest: str  # a hash that changes with the tokens or with the tokens that the loss counts
    notes: list[str]  # lines about the data and the parts that are omitted
    warnings: list[str]  # lines about probable mistakes
    sources: dict[str, Corpus | Conversations]  # whole documents or conversations, by source name
    stream: StreamSource | None = None  # the stream to train on, if the data are streamed
    with_images: Sequence[str] = ()  # names of the sources with images, also of the one to evaluate on


def prepare_data(recipe: Recipe, *, vocab_size: int | None = None) -> PreparedData:
    """Tokenize a recipe's data, unless they are cached, for a model's vocabulary size, if known.

    Raises:
        ValueError: the data cannot be used; the message names the file and says what to do.
    """
    data = recipe.data
    sources: list[Source] = []
    if data.sources is not None:
        weights = read_weights(data.sources)
        sources = [
            replace(_prepared(recipe, Path(path).expanduser(), vocab_size), weight=it) for path, it in weights.items()
        ]
    elif not data.streaming:
        sources = [_prepared(recipe, data.path, vocab_size)]
    evaluation = None if data.evaluation_path is None else _prepared(recipe, data.evaluation_path, vocab_size)
    return PreparedData(sources=sources, evaluation=evaluation)


def _prepared(recipe: Recipe, path: Path | None, vocab_size: int | None) -> Source:
    options, cache = recipe.data, recipe.token_cache_folder
    files: Path | Sequence[Path] | None = path
    if path is None and options.dataset is not None:
        files = hub_files(options.dataset, config=options.dataset_config, split=options.dataset_split)
    tokenizer, tokenizer_name = tokenizer_of(recipe)
    has_answers = options.chat or recipe.dpo.beta > 0
    if has_answers:
        encoder = (
            PreferenceEncoder(tokenizer_name)
            if recipe.dpo.beta
            else ChatTemplate(tokenizer_name, sequence_length=options.sequence_length)
        )
        entry = build_conversations(files, tokenizer, encoder, cache_folder=cache, suffixes=options.suffixes)
    else:
        entry = build_corpus(
            files,
            tokenizer,
            cache_folder=cache,
            suffixes=options.suffixes,
            include_tests=options.include_tests,
            column=options.column,
            token_dtype=options.token_dtype,
            vocab_size=vocab_size,
        )
    left_out = files_left_out(path, options.suffixes, takes_rows=has_answers or options.column is not None)
    name = str(path or options.dataset or "the standard library")
    return Source(name=name, entry=entry, folder=image_folder(files), left_out=left_out)


def open_data(recipe: Recipe, prepared: PreparedData) -> RunData:
    """Open the output of `prepare_data`, in this or another process.

    Raises:
        ValueError: there are too few data, the cache is damaged, or there is nothing to stream.
    """
    if recipe.data.streaming:
        return _opened_stream(recipe, prepared.evaluation)
    fraction = recipe.data.held_out_fraction if prepared.evaluation is None else 0.0
    opened = [_opened(recipe, source, fraction) for source in prepared.sources]
    notes, warnings, digests = [], [], []
    for source, data in zip(prepared.sources, opened, strict=True):
        prefix = f"{source.name}: " if len(opened) > 1 else ""
        notes += [source.left_out] if source.left_out else []
        notes += [prefix + line for line in data.notes]
        warnings += [prefix + line for line in data.warnings]
        digests.append(data.digest)
    weights = [source.weight for source in prepared.sources]
    train = mix([data.train for data in opened], [it / sum(weights) for it in weights])
    held_out = mix([data.held_out for data in opened], [it / sum(weights) for it in weights])
    digest = digests[0]
    if len(opened) > 1:
        digest = hashlib.sha256(json.dumps([digests, weights]).encode()).hexdigest()[:32]
        lengths = ", ".join(
            f"{len(data.train):,} of {source.name} (weight {source.weight:g})"
            for source, data in zip(prepared.sources, opened, strict=True)
        )
        notes.append(f"an epoch has {len(train):,} sequences of a mixture of {lengths}")
    with_images = [name for data in opened for name in data.with_images]
    if prepared.evaluation is not None:
        evaluation = _opened(recipe, prepared.evaluation, 0.0)
        with_images += evaluation.with_images
        held_out = evaluation.train
        notes.append(f"evaluation: {len(held_out):,} sequences of {prepared.evaluation.name}")
        warnings += [f"{prepared.evaluation.name}: {line}" for line in evaluation.warnings]
    whole = {name: it for data in opened for name, it in data.sources.items()}
    return RunData(train, held_out, digest, notes, warnings, whole, with_images=with_images)


def _opened(recipe: Recipe, source: Source, held_out_fraction: float) -> RunData:
    """Open a single source."""
    options = recipe.data
    if recipe.dpo.beta:
        answers = open_conversations(source.entry)
        pairs, others, warnings = cut_preferences(
            answers, sequence_length=options.sequence_length, held_out_fraction=held_out_fraction
        )
        notes = [f"{len(pairs):,} pairs of answers to train on, {len(others):,} held out"]
        return RunData(pairs, others, answers.index.digest, notes, warnings, {source.name: answers})
    if options.chat:
        conversations = open_conversations(source.entry, source.folder)
        train, held_out, cuts = cut_conversations(
            conversations,
            sequence_length=options.sequence_length,
            held_out_fraction=held_out_fraction,
            packed=options.packing,
        )
        told = describe_conversations(train, cuts)
        digest = conversations.index.digest + ("-packed" if options.packing else "")
        with_images = [] if conversations.images is None else [source.name]
        whole: dict[str, Corpus | Conversations] = {source.name: conversations}
        return RunData(train, held_out, digest, told.notes, told.warnings, whole, with_images=with_images)
    corpus = open_corpus(source.entry)
    notes = [f"left out: {count} {reason}" for reason, count in corpus.index.skipped.items()]
    pieces = pack_corpus(corpus, sequence_length=options.sequence_length, held_out_fraction=held_out_fraction)
    return RunData(*pieces, corpus.index.digest, notes, [], {source.name: corpus})


def _opened_stream(recipe: Recipe, evaluation: Source | None) -> RunData:
    options, (tokenizer, _) = recipe.data, tokenizer_of(recipe)
    assert options.column is not None
    made_of: list[object] = [tokenizer.fingerprint, options.column]
    if options.dataset is not None:
        name = options.dataset
        made_of += [name, options.dataset_config, options.dataset_split]
        texts = stream_hub(name, options.column, config=options.dataset_config, split=options.dataset_split)
        read = f"rows of {name}"
    else:
        name = str(options.path)
        files = find_tables(options.path, suffixes=options.suffixes or TABLE_SUFFIXES)
        made_of += [[file, path.stat().st_size] for file, path in files]
        texts = stream_files(files, options.column)
        read = f"rows of {len(files):,} files of {name}"
    stream = StreamSource(name, texts, tokenizer, options.sequence_length, options.shuffle_buffer_size)
    nothing = TokenRows(np.empty((0, options.sequence_length + 1), dtype=np.int64))
    held_out = nothing if evaluation is None else _opened(recipe, evaluation, 0.0).train
    digest = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]
    notes = [f"{read} are streamed, with a shuffle buffer of {options.shuffle_buffer_size:,} sequences"]
    if evaluation is not None:
        notes.append(f"evaluation: {len(held_out):,} sequences of {evaluation.name}")
    left_out = files_left_out(options.path, options.suffixes, takes_rows=True)
    return RunData(nothing, held_out, digest, notes + ([left_out] if left_out else []), [], {}, stream)


def with_counted_steps(recipe: Recipe, train: Sequences) -> Recipe:
    """Return the recipe with the `train.steps` of its `train.epochs`, instead of these, if they are set.

    Raises:
        RecipeError: these steps do not fit other keys, such as `train.stop_after`.
    """
    options = recipe.train
    if options.epochs is None:
        return recipe
    steps = max(1, math.ceil(options.epochs * len(train) / options.global_batch_size))
    counted = replace(recipe, train=replace(options, steps=steps, epochs=None))
    if mistakes := [it.text for it in consistency_mistakes(counted)]:
        raise RecipeError(f"recipe with train.epochs={options.epochs:g}, which is {steps} steps of this data", mistakes)
    return counted
