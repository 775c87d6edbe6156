"""Checks of arguments that several functions share: flags, timeouts and tags, the names of checkpoints.

A ValueError shows the value and what to pass instead.
"""

import math
import os
import re

from nxd_ckpt.objects import is_unicode


def check_flags(**flags: object) -> None:
    """Accept only True and False: most other values, such as the string "no", would count as True.

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
    """Accept a finite number of seconds above 0; raise a ValueError for anything else."""
    if not is_timeout(timeout):
        raise ValueError(f"timeout={timeout!r} is not a number of seconds above 0")


def is_timeout(timeout: object) -> bool:
    """Whether a value is a finite number of seconds above 0."""
    return type(timeout) in (int, float) and 0 < timeout < math.inf  # type: ignore[operator]


# File systems support names of 255 bytes; LATEST is the hint file beside the checkpoints.
_TAG = re.compile(r"(?!\.|LATEST\Z)[^/\\\x00-\x1f\x7f]+")
_MAX_BYTES = 200


def is_tag(name: object) -> bool:
    """Whether this can be the name of a checkpoint."""
    return (
        isinstance(name, str)
        and _TAG.fullmatch(name) is not None
        and is_unicode(name)
        and len(name.encode()) <= _MAX_BYTES
    )


def check_tag(tag: str) -> str:
    """Return the tag.

    Raises:
        ValueError: it cannot be the name of a checkpoint.
    """
    if not is_tag(tag):
        raise ValueError(
            f"tag {tag!r} is not allowed: a tag is the name of a folder, such as 'step-1000'; it has 1 to "
            f"{_MAX_BYTES} bytes of UTF-8, no separators or control characters, does not start with a dot, and is not "
            "'LATEST'"
        )
    return tag
