"""The small things saved besides tensors: only what JSON can hold, so that nothing ever has to be unpickled."""

MAX_NESTING = 64


def check_json(value: object, where: str, *, nesting: int = 0) -> None:
    """Accepts None, bool, int, float, str, and lists, tuples and dicts of them, nested at most `MAX_NESTING` deep.

    Tuples come back as lists. Keys must be strings, as JSON would quietly turn others into strings.

    Raises:
        ValueError: names the first part that JSON cannot hold.
    """
    if nesting > MAX_NESTING:
        raise ValueError(f"{where[:100]}... is nested more than {MAX_NESTING} deep")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; JSON keys are strings, so use {str(key)!r}")
            check_json(item, f"{where}[{key!r}]", nesting=nesting + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_json(item, f"{where}[{index}]", nesting=nesting + 1)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError(
            f"{where} is a {type(value).__name__}, which JSON cannot hold; pass tensors in state, and of other "
            "objects their numbers and strings"
        )
