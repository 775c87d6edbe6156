"""Programs of other libraries, as people write them, recorded by nxd-parity and compared with one process."""

import random
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the tests of this folder share programs
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))


def recorded(train: Callable[..., object], folder: Path, dtype: torch.dtype, noise: int | None, given: Any) -> None:
    """Train in this process, from equal seeds, and record it."""
    from nxd_parity import InFloat64, record

    random.seed(0)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())  # libraries change what is shown of them, for later tests, too
        if dtype == torch.float64:
            stack.enter_context(InFloat64())
        stack.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(dtype)
        stack.enter_context(record(folder, noise=noise))
        train(**given)


@pytest.fixture(scope="session")
def references(tmp_path_factory) -> Callable[..., list[Path]]:
    """`references(train, dtype, given)`: recordings of one process, with noise below float64; each made once."""
    made: dict[Any, list[Path]] = {}

    def make(train: Callable[..., object], dtype: torch.dtype, given: dict[str, Any]) -> list[Path]:
        key = (train.__module__, train.__name__, dtype, str(given))
        if key not in made:
            folder = tmp_path_factory.mktemp("reference")
            noises = [None] if dtype == torch.float64 else [None, 1, 2]
            for noise in noises:
                recorded(train, folder / f"{noise}", dtype, noise, given)
            made[key] = [folder / f"{noise}" for noise in noises]
        return made[key]

    return make


@pytest.fixture
def compared(references, run_ranks, tmp_path):
    """`compared(train, ranks, dtype, reference={...}, **given)`: a report of a program on ranks against one process."""
    from nxd_parity import compare

    def run(
        train: Callable[..., object],
        ranks: int = 2,
        dtype: torch.dtype = torch.float64,
        *,
        reference: dict[str, Any] | None = None,
        **given: Any,
    ):
        whole, *spread = references(train, dtype, reference or {})
        run_ranks(recorded, ranks, train, tmp_path / "candidate", dtype, None, given, timeout=120)
        return compare(whole, tmp_path / "candidate", spread=spread)

    return run
