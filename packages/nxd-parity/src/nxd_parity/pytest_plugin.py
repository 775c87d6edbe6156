"""The pytest plugin: the fixture `assert_same_training`. It is an entry point of nxd-parity."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from nxd_parity.testing import assert_same_training as same_training


@pytest.fixture
def assert_same_training(tmp_path: Path) -> Callable[..., None]:
    """`nxd_parity.testing.assert_same_training`, which keeps recordings that differ in the test's `tmp_path`."""
    return partial(same_training, folder=tmp_path)
