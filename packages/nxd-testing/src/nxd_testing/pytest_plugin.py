"""The pytest plugin: the fixture `run_ranks`.

Registered as an entry point of nxd-testing; where the package is not installed, `pytest -p
nxd_testing.pytest_plugin` does the same. What ranks print goes to stdout with their numbers, so pytest
shows it with the test that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """`run_on_ranks`, on worker processes that all tests of the session share."""
    from nxd_testing.pool import run_on_ranks  # noqa: PLC0415 - no test that needs it, no cost

    return run_on_ranks
