"""Small values saved besides tensors: only JSON values, so that nothing ever has to be unpickled."""

MAX_NESTING = 64
_MAX_INT_BITS = 8192  # Python itself does not read numbers of more than 4300 digits


def check_json(value: object, where: str, *, nesting: int = 0) -> None:
    """Accepts None, bool, int, float, str, and lists, tuples and dicts of them, nested at most `MAX_NESTING` deep.

    Tuples come back as lists. Keys must be strings, as JSON would quietly turn others into strings. Halves of surrogate
    pairs would quietly be joined.

    Raises:
        ValueError: names the first part that JSON cannot hold.
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
            raise ValueError(f"{where} is a number of {value.bit_length()} bits; pass one so large as text")
    elif value is not None and not isinstance(value, float):
        raise ValueError(
            f"{where} is a {type(value).__name__}, which JSON cannot hold; pass tensors in state, and of other "
            "objects their numbers and strings"
        )


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8, which half a surrogate pair cannot."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False
