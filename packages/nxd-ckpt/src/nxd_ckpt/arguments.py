"""Checks of arguments that several functions share. A ValueError shows the value and what to pass instead."""

import math
import os


def check_flags(**flags: object) -> None:
    """Accepts only True and False: most other values, such as the string "no", would count as True.

    Raises:
        ValueError: names the first flag that is neither.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} is a {type(value).__name__}; pass True or False")


_DEFAULT_TIMEOUT = 1800.0  # seconds


def default_timeout() -> float:
    """Return the default number of seconds that ranks wait for each other: `NXD_TIMEOUT`, else half an hour."""
    text = os.environ.get("NXD_TIMEOUT", "")
    try:
        seconds = float(text)
    except ValueError:
        return _DEFAULT_TIMEOUT
    return seconds if is_timeout(seconds) else _DEFAULT_TIMEOUT


def check_timeout(timeout: float) -> None:
    """Accepts a number of seconds.

    Raises:
        ValueError: it is not a finite number above 0.
    """
    if not is_timeout(timeout):
        raise ValueError(f"timeout={timeout!r} is not a number of seconds above 0")


def is_timeout(timeout: object) -> bool:
    """Whether a value is a finite number of seconds above 0."""
    return type(timeout) in (int, float) and 0 < timeout < math.inf  # type: ignore[operator]
