"""What a check found: whether it is right, and how to mend it."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: what was looked at.
        status: "wrong" keeps training from working; a "warning" may.
        found: what there is.
        mend: what to do about it; empty if nothing is to be done.
    """

    check: str
    status: Status
    found: str
    mend: str = ""


def ok(check: str, found: str) -> Finding:
    """Nothing is to be done."""
    return Finding(check, "ok", found)


def warning(check: str, found: str, mend: str) -> Finding:
    """Training works, but not well, or not everywhere."""
    return Finding(check, "warning", found, mend)


def wrong(check: str, found: str, mend: str) -> Finding:
    """Training does not work."""
    return Finding(check, "wrong", found, mend)
