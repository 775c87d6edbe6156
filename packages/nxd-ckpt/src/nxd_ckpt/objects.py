"""The small things saved besides tensors: only what JSON can hold, so that nothing ever has to be unpickled."""


def check_json(value: object, where: str) -> None:
    """Accepts None, bool, int, float, str, and lists, tuples and dicts of them.

    Tuples come back as lists. Keys must be strings, as JSON would quietly turn others into strings.

    Raises:
        ValueError: names the first part that JSON cannot hold.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; JSON keys are strings, so use {str(key)!r}")
            check_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_json(item, f"{where}[{index}]")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError(
            f"{where} is a {type(value).__name__}, which JSON cannot hold; pass tensors in state, and of other "
            "objects their numbers and strings"
        )
