"""Reads rows from files of JSONL, JSON, CSV, parquet and arrow, and finds the files of datasets on the hub.

Each row comes with its location, for messages; nothing here interprets the columns. This is the only module that
imports pyarrow, for parquet and arrow, and datasets, for the hub. Parquet and arrow files can claim any number of rows
and values in a few bytes, so there are limits relative to the size of a file.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

# Columns, and fields of messages, whose values are texts or lists of objects.
TEXTS_OR_LISTS = ("content", "value", "prompt", "completion", "chosen", "rejected")

Decode = Callable[[Any], Any]

_LEAST_ALLOWANCE, _ALLOWANCE_PER_BYTE = 1 << 26, 1024  # values, and bytes of texts; no format compresses better
_LEAST_ROWS, _ROWS_PER_BYTE = 1 << 20, 16
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1024, 1 << 26
Row = tuple[str, Mapping[str, Any]]  # its location, such as "a.jsonl, line 3", and its values by column


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file in order, reading them as needed.

    Args:
        path: a file with one of `TABLE_SUFFIXES`, which determines its format.

    Raises:
        ValueError: the file is damaged or has another format; or pyarrow is not installed.
    """
    try:
        yield from _READERS[path.suffix](path)
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}; fix it, or remove it from data.path") from error


def read_texts(path: Path, column: str) -> Iterator[str]:
    """Yield the texts in a column, row by row; a missing value is an empty text.

    Raises:
        ValueError: as for `read_rows` and `text_in`.
    """
    for place, row in read_rows(path):
        yield text_in(place, row, column)


def text_in(place: str, row: Mapping[str, Any], column: str) -> str:
    """Return the text in a column of a row; a missing value is an empty text.

    Raises:
        ValueError: the row lacks the column, or its value is not text.
    """
    if column not in row:
        raise ValueError(f"{place} has no column {column!r}; set data.column to one of {', '.join(map(str, row))}")
    text = "" if row[column] is None else row[column]
    if not isinstance(text, str):
        raise ValueError(
            f"{place}: {column} is a {type(text).__name__}, not text; set data.column to a column of text, or "
            "data.chat=true for conversations"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half a character
        raise ValueError(f"{place}: {column} cannot be written as UTF-8: {error.reason}; fix it") from error
    return text


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                place = f"{path}, line {number}"
                yield place, _object(place, _parse(place, line), "an object on each line")


def _json_rows(path: Path) -> Iterator[Row]:
    content = _parse(str(path), path.read_text(encoding="utf-8-sig"))
    if not isinstance(content, list):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected a list of objects, or name it .jsonl")
    for number, value in enumerate(content, start=1):
        place = f"{path}, row {number}"
        yield place, _object(place, value, "a list of objects")


def _parse(place: str, text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}; fix or remove it") from error
    return value


def _object(place: str, value: object, expected: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} holds a {type(value).__name__}; expected {expected}")
    return value


def _csv_rows(path: Path) -> Iterator[Row]:
    limit = csv.field_size_limit(sys.maxsize)  # the default is 128 KiB
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            for number, row in enumerate(csv.DictReader(stream, strict=True), start=1):
                place = f"{path}, row {number}"
                if None in row or None in row.values():
                    raise ValueError(f"{place} does not have the same number of fields as the first line; fix it")
                yield place, row
    except csv.Error as error:
        raise ValueError(f"{path} is not CSV: {error}; fix it, or remove it from data.path") from error
    finally:
        csv.field_size_limit(limit)


def _parquet_rows(path: Path) -> Iterator[Row]:
    _import_pyarrow(path)
    import pyarrow.parquet  # noqa: PLC0415 - optional

    def batches() -> Iterator[Any]:
        with pyarrow.parquet.ParquetFile(path) as file:
            about = file.metadata
            _check_rows(path, about.num_rows)
            num_bytes = sum(about.row_group(index).total_byte_size for index in range(about.num_row_groups))
            yield from file.iter_batches(batch_size=_rows_at_once(about.num_rows, num_bytes))

    yield from _rows_of_batches(path, batches)


def _arrow_rows(path: Path) -> Iterator[Row]:
    arrow = _import_pyarrow(path)
    import pyarrow.ipc  # noqa: PLC0415 - optional

    def batches() -> Iterator[Any]:
        with arrow.memory_map(str(path)) as source:
            try:
                reader = pyarrow.ipc.open_stream(source)  # as written by the package datasets
            except arrow.ArrowInvalid:
                reader = pyarrow.ipc.open_file(source)
                yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
            else:
                yield from reader

    yield from _rows_of_batches(path, batches)


def _rows_of_batches(path: Path, batches: Callable[[], Iterator[Any]]) -> Iterator[Row]:
    arrow = _import_pyarrow(path)
    number, left = 0, _LEAST_ALLOWANCE + _ALLOWANCE_PER_BYTE * path.stat().st_size
    num_rows = 0
    try:
        for batch in batches():
            num_rows += batch.num_rows
            _check_rows(path, num_rows)
            decoders = _decoders(batch.schema)
            count = _rows_at_once(batch.num_rows, batch.nbytes)
            for start in range(0, batch.num_rows, count):
                part = batch.slice(start, count)
                for name, column in zip(part.schema.names, part.columns, strict=True):
                    left -= _cost(f"{path}: column {name!r}", column, left)
                for row in part.to_pylist():
                    number += 1
                    place = f"{path}, row {number}"
                    yield place, {name: _decoded(place, value, decoders.get(name)) for name, value in row.items()}
    except arrow.ArrowException as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{path} is not {path.suffix[1:]}: {reason}; fix it, or remove it from data.path") from error


def _rows_at_once(num_rows: int, num_bytes: int) -> int:
    """Return how many rows to hold at a time; images make rows large."""
    return max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE * num_rows // max(1, num_bytes)))


def _decoders(schema: Any) -> dict[str, Decode | None]:
    """Return a decoder for each column that needs one.

    The package datasets saves values of mixed types as JSON text, which the schema's features or a column's type tell.
    """
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        features = {}
    features = features if isinstance(features, dict) else {}
    return {field.name: _decoder(field.name, field.type, features.get(field.name)) for field in schema}


def _decoder(name: str, kind: Any, feature: Any) -> Decode | None:
    import pyarrow  # noqa: PLC0415 - optional

    if getattr(kind, "extension_name", None) == "arrow.json" or _type_of(feature) == "Json":
        return lambda value: _from_json(name, value) if isinstance(value, str) else value
    if pyarrow.types.is_map(kind):
        of_items = _decoder("", kind.item_type, None)
        return lambda pairs: pairs and {key: of_items(item) if of_items else item for key, item in pairs}
    if hasattr(kind, "value_type") and not pyarrow.types.is_dictionary(kind):
        inner = feature[0] if isinstance(feature, list) and feature else feature
        inner = inner.get("feature") if _type_of(inner) in ("List", "LargeList", "Sequence") else inner
        of_values = _decoder(name, kind.value_type, inner)
        return of_values and (lambda values: values and [of_values(value) for value in values])
    if pyarrow.types.is_struct(kind):
        known = feature if isinstance(feature, dict) else {}
        found = {field.name: _decoder(field.name, field.type, known.get(field.name)) for field in kind}
        fields = {field: decode for field, decode in found.items() if decode is not None}
        return (lambda value: value and _with_fields(value, fields)) if fields else None
    return None


def _type_of(feature: Any) -> Any:
    return feature.get("_type") if isinstance(feature, dict) else None


def _with_fields(value: dict[str, Any], fields: Mapping[str, Decode]) -> dict[str, Any]:
    return {name: fields[name](item) if name in fields else item for name, item in value.items()}


def _from_json(name: str, text: str) -> Any:
    value = json.loads(text)
    if name in TEXTS_OR_LISTS and not isinstance(value, str):
        # A text that happens to be JSON, such as "42", is saved unchanged.
        is_list = isinstance(value, list) and all(isinstance(item, dict) for item in value)
        return value if is_list else text
    return value


def _decoded(place: str, value: Any, decode: Decode | None) -> Any:
    if decode is None:
        return value
    try:
        return decode(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} holds invalid JSON: {error}; fix or remove it") from error


def _check_rows(path: Path, num_rows: int) -> None:
    """Raise ValueError if a file claims more rows than fit in it."""
    num_bytes = path.stat().st_size
    if num_rows > _LEAST_ROWS + _ROWS_PER_BYTE * num_bytes:
        raise ValueError(f"{path} claims {num_rows} rows in {num_bytes} bytes; remove it from data.path")


def _cost(what: str, array: Any, most: int) -> int:
    """Return the number of values, plus bytes of texts, of an array in Python; arrow may share a few bytes for all.

    Raises:
        ValueError: there are more than `most`, or their type does not tell how many there are.
    """
    pyarrow, compute, types = (import_module(name) for name in ("pyarrow", "pyarrow.compute", "pyarrow.types"))
    if isinstance(array.type, pyarrow.BaseExtensionType):
        array = array.storage
    kind, cost, held = array.type, len(array), []
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if types.is_dictionary(kind) and _is_text(kind.value_type):
        cost += _total(compute.take(_text_lengths(array.dictionary), array.indices))
    elif _is_text(kind):
        cost += _total(_text_lengths(array))
    elif types.is_struct(kind):
        held = array.flatten()
    elif is_list or types.is_map(kind):
        lists = array if is_list else array.cast(pyarrow.list_(pyarrow.struct([kind.key_field, kind.item_field])))
        cost += _total(compute.list_value_length(lists))
        held = [lists.flatten()] if cost <= most else []
    elif types.is_nested(kind) or (types.is_dictionary(kind) and not types.is_primitive(kind.value_type)):
        raise ValueError(f"{what} is {kind}, which is not supported; write it as plain values or lists")
    for one in held:
        cost += _cost(what, one, most - cost)
    if cost > most:
        raise ValueError(f"{what} claims more values than fit into the file; remove it from data.path")
    return cost


def _total(numbers: Any) -> int:
    compute = import_module("pyarrow.compute")
    return compute.sum(numbers.cast("int64")).as_py() or 0


def _is_text(kind: Any) -> bool:
    types = import_module("pyarrow.types")
    kinds = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return any(getattr(types, f"is_{name}")(kind) for name in kinds)


def _text_lengths(array: Any) -> Any:
    """Return the length of each text in bytes, which pyarrow itself does not tell for views."""
    pyarrow, compute, types = (import_module(name) for name in ("pyarrow", "pyarrow.compute", "pyarrow.types"))
    if not (types.is_string_view(array.type) or types.is_binary_view(array.type)):
        return compute.binary_length(array)
    views = np.frombuffer(array.buffers()[1], dtype="<i4").reshape(-1, 4)  # each starts with the length
    return pyarrow.array(views[array.offset : array.offset + len(array), 0])


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
    datasets = import_datasets(name)
    try:
        data = datasets.load_dataset(name, config, split=split)
        files = [Path(file["filename"]) for file in data.cache_files]
    except Exception as error:  # format readers and the network raise many types
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"data.dataset={name} (data.dataset_split={split}) cannot be read: {reason}") from error
    if not files:
        raise ValueError(f"data.dataset={name} (data.dataset_split={split}) holds no rows; name another split")
    return files


def import_datasets(name: str) -> Any:
    """Return the package `datasets`, which does not run a dataset's code from version 4; `name` is for messages."""
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise ValueError(
            f"data.dataset={name} needs the package datasets, which is missing: pip install 'nxd-data[hub]'"
        ) from error
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise ValueError(
            f"data.dataset={name} needs datasets 4 or later, which does not run a dataset's code, not "
            f"{datasets.__version__}: pip install 'nxd-data[hub]'"
        )
    return datasets


def _import_pyarrow(path: Path) -> Any:
    try:
        import pyarrow  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ValueError(f"{path} needs pyarrow, which is missing: pip install 'nxd-data[text]'") from error
    return pyarrow


_READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
}
