"""The pytest plugin: the fixture `run_ranks`.

It is an entry point of nxd-testing; `pytest -p nxd_testing.pytest_plugin` loads it from a source tree. The ranks'
output goes to stdout with their numbers, so pytest shows it with the failing test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nxd_testing.pool import run_on_ranks


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """`run_on_ranks`, on worker processes that all tests of the session share."""
    return run_on_ranks
