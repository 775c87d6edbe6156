"""The exceptions of this package other than ValueError, and how errors are formatted."""

import re
from collections.abc import Iterable

LISTED = 4  # names of the same first part that are listed one by one

_FIRST_PART = re.compile(r"^([^./]*[./]).*", re.DOTALL)  # of a name such as model.norm.weight or optimizer/step


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, found, parsed or read; complete checkpoints are unharmed."""

    user_can_mend = True  # command lines show its message without a traceback


class MismatchError(CheckpointError):
    """A checkpoint is intact but does not match the request, so falling back to an older one would not help."""


def one_line(error: BaseException) -> str:
    """Return an error's type and first line, to report to other ranks. File names in it may not be valid Unicode."""
    text = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
    return text.encode("utf-8", "backslashreplace").decode()


def printable(text: str) -> str:
    """Escape characters that could move the cursor or break a line: names and messages come from other sources."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def by_prefix(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names that begin alike, by patterns such as "model.*"."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_FIRST_PART.sub(r"\1*", name), []).append(name)
    return groups


class RanksLostError(CheckpointError):
    """Other ranks did not answer. The checkpoint is not at fault, so falling back to another one would not help."""
