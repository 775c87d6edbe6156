"""What to tell a user who lacks one of the packages of the extra `nxd-trainer[report]`."""

from __future__ import annotations


def missing_extra(package: str, purpose: str) -> str:
    """One line: what is not there, and how to get it."""
    return f"{purpose} left out: {package} is not installed (pip install 'nxd-trainer[report]')"
