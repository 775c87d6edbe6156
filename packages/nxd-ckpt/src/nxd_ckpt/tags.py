"""Tags, the names of checkpoints: a tag must be a valid folder name in every kind of store."""

import re

from nxd_ckpt.objects import is_unicode

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
