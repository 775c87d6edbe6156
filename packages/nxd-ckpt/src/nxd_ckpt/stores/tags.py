"""Names of checkpoints: a tag is the name of a folder in every kind of store."""

import re

_TAG = re.compile(r"(?!\.)[^/\\\x00-\x1f\x7f]{1,200}")


def is_tag(name: object) -> bool:
    """Whether this can be the name of a checkpoint."""
    return isinstance(name, str) and _TAG.fullmatch(name) is not None


def check_tag(tag: str) -> str:
    """Returns the tag if it can be the name of a folder.

    Raises:
        ValueError: it cannot.
    """
    if not is_tag(tag):
        raise ValueError(
            f"tag {tag!r} is not allowed: a tag is the name of a folder, such as 'step-1000'; it has 1 to 200 "
            "characters, no separators or control characters, and does not start with a dot"
        )
    return tag
