"""Datasets of the Hugging Face hub, through the package `datasets`; the only module that imports it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from nxd_trainer.data.streaming import ReadTexts
from nxd_trainer.data.tables import text_in


def hub_files(name: str, *, config: str | None = None, split: str = "train") -> list[Path]:
    """Return the arrow files of a dataset's split, downloaded and converted unless they are cached.

    Args:
        name: name on the hub, such as `HuggingFaceH4/ultrachat_200k`, or a local folder for `datasets.load_dataset`.
        config: config of a dataset that has several; None for its only one.
        split: a whole split, such as `train`.

    Raises:
        ValueError: there is no such dataset, it needs code, or the package `datasets` is not installed.
    """
    if "[" in split or "+" in split:
        raise ValueError(f"data.dataset_split={split} is a slice or a sum; name one split, such as train")
    datasets = _import_datasets(name)
    try:
        data = datasets.load_dataset(name, config, split=split)
        files = [Path(file["filename"]) for file in data.cache_files]
    except Exception as error:  # format readers and the network raise many types
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"data.dataset={name} (data.dataset_split={split}) cannot be read: {reason}") from error
    if not files:
        raise ValueError(f"data.dataset={name} (data.dataset_split={split}) holds no rows; name another split")
    return files


def stream_hub(name: str, column: str, *, config: str | None = None, split: str = "train") -> ReadTexts:
    """Stream the texts in a column of a split from the hub; arguments as for `hub_files`.

    Raises:
        ValueError: as for `hub_files`; while reading, also if a row lacks the column or cannot be read.
    """
    datasets = _import_datasets(name)

    def rows(start: int) -> Iterator[Any]:
        try:
            yield from datasets.load_dataset(name, config, split=split, streaming=True).skip(start)
        except Exception as error:  # as in `hub_files`
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ValueError(f"data.dataset={name} (data.dataset_split={split}) cannot be read: {reason}") from error

    def read(start: int) -> Iterator[str]:
        for number, row in enumerate(rows(start), start=start + 1):
            yield text_in(f"{name}, row {number}", row, column)

    return read


def _import_datasets(name: str) -> Any:
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise ValueError(
            f"data.dataset={name} needs the package datasets, which is missing: pip install 'nxd-trainer[hub]'"
        ) from error
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise ValueError(
            f"data.dataset={name} needs datasets 4 or later, which does not run a dataset's code, not "
            f"{datasets.__version__}: pip install 'nxd-trainer[hub]'"
        )
    return datasets
