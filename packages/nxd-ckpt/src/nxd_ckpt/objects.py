"""Small values saved besides tensors: only JSON values, so that nothing ever has to be unpickled.

`encode` also represents values that JSON lacks: tensors are replaced by references, and tuples and keys that are not
strings keep their types. `decode` reverses it.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nxd_ckpt.errors import CheckpointError

MAX_NESTING = 64
# A dict with a single one of these keys represents a value that JSON lacks.
_TENSOR, _DICT, _TUPLE = "$tensor", "$dict", "$tuple"
_MAX_INT_BITS = 8192  # Python itself does not read numbers of more than 4300 digits


def check_json(value: object, where: str, *, nesting: int = 0) -> None:
    """Accept None, bool, int, float, str, and lists, tuples and dicts of them, nested at most `MAX_NESTING` deep.

    Tuples come back as lists. Keys must be strings, as JSON would silently convert others to strings. Halves of
    surrogate pairs are refused, as JSON would silently join them.

    Raises:
        ValueError: JSON cannot represent a part; names the first one.
    """
    if nesting > MAX_NESTING:
        raise ValueError(f"{where[:100]}... is nested more than {MAX_NESTING} deep")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; JSON keys are strings, so use {str(key)!r}")
            check_json(key, f"a key of {where}", nesting=nesting)
            check_json(item, f"{where}[{key!r}]", nesting=nesting + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_json(item, f"{where}[{index}]", nesting=nesting + 1)
    elif isinstance(value, str):
        if not is_unicode(value):
            raise ValueError(f"{where} is {value!r}, which is not valid Unicode; pass bytes as numbers or hex digits")
    elif isinstance(value, int):
        if value.bit_length() > _MAX_INT_BITS:
            raise ValueError(f"{where} is a number of {value.bit_length()} bits; pass a number this large as a string")
    elif value is not None and not isinstance(value, float):
        raise ValueError(
            f"{where} is a {type(value).__name__}, which JSON cannot hold; pass tensors in state, and the "
            "numbers and strings of other objects"
        )


def is_unicode(text: str) -> bool:
    """Whether a string can be encoded as UTF-8, unlike half a surrogate pair."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def encode(
    value: Any,
    where: str,
    is_tensor: Callable[[Any], bool],
    tensors: dict[str, Any],
    name: str = "",
    *,
    nesting: int = 0,
) -> Any:
    """Encode a nested value as JSON.

    Args:
        value: None, bool, int, float, str, tensors, and lists, tuples and mappings of them.
        where: its path, for messages.
        is_tensor: function that tells whether to replace a value by a reference.
        tensors: dict that receives the tensors by name: their path in the value, joined by dots, made unique.
        name: the path of this part.
        nesting: number of enclosing containers.

    Raises:
        ValueError: a part has another type; names the first one.
    """
    if nesting > MAX_NESTING:
        raise ValueError(f"{where[:100]}... is nested more than {MAX_NESTING} deep")
    if is_tensor(value):
        while name in tensors:
            name += "'"
        tensors[name] = value
        return {_TENSOR: name}

    def inside(key: Any, item: Any) -> Any:
        inner = f"{name}.{key}" if name else str(key)
        return encode(item, f"{where}[{key!r}]", is_tensor, tensors, inner, nesting=nesting + 1)

    if isinstance(value, Mapping):
        if unusable := [key for key in value if not isinstance(key, str | int)]:
            raise ValueError(f"{where} has the key {unusable[0]!r}; use strings or integers as keys")
        pairs = [[key, inside(key, item)] for key, item in value.items()]
        if all(isinstance(key, str) for key, _ in pairs) and not (len(pairs) == 1 and pairs[0][0].startswith("$")):
            return dict(pairs)
        return {_DICT: pairs}
    if isinstance(value, list | tuple):
        items = [inside(index, item) for index, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    check_json(value, where)
    return value


def references(encoded: Any) -> Iterator[str]:
    """Yield the names of the tensors in a value encoded by `encode`."""
    if isinstance(encoded, list):
        for item in encoded:
            yield from references(item)
    elif isinstance(encoded, dict) and isinstance(encoded.get(_TENSOR), str) and len(encoded) == 1:
        yield encoded[_TENSOR]
    elif isinstance(encoded, dict):
        yield from references(list(encoded.values()))


def decode(encoded: Any, tensors: Mapping[str, Any], present: Any = None) -> Any:
    """Decode a value encoded by `encode`.

    Args:
        encoded: the encoded value.
        tensors: the tensors by name.
        present: the value to be replaced; mappings keep its classes, such as `Counter`.

    Raises:
        CheckpointError: the value was not created by `encode`.
    """
    match encoded:
        case {"$tensor": str(name)} if len(encoded) == 1:
            return tensors[name]
        case {"$tuple": list(items)} if len(encoded) == 1:
            return tuple(_decoded_items(items, tensors, present))
        case {"$dict": list(pairs)} if len(encoded) == 1:
            if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str | int) for pair in pairs):
                raise CheckpointError(f"{str(pairs)[:100]} is not a list of keys and values")
            return _decoded_mapping(pairs, tensors, present)
        case dict():
            return _decoded_mapping(encoded.items(), tensors, present)
        case list():
            return _decoded_items(encoded, tensors, present)
    return encoded


def _decoded_items(items: list[Any], tensors: Mapping[str, Any], present: Any) -> list[Any]:
    before = list(present) if isinstance(present, list | tuple) else []
    return [decode(item, tensors, before[index] if index < len(before) else None) for index, item in enumerate(items)]


def _decoded_mapping(pairs: Any, tensors: Mapping[str, Any], present: Any) -> Any:
    before = present if isinstance(present, Mapping) else {}
    content = {key: decode(item, tensors, before.get(key)) for key, item in pairs}
    if type(present) is dict or not isinstance(present, dict):
        return content
    made = copy.copy(present)
    made.clear()
    made.update(content)
    return made
