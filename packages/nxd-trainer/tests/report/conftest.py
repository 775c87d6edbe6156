"""Records of an imaginary run, and a stand-in for a package that is not installed."""

import sys
from collections.abc import Callable

import pytest
from nxd_trainer.report import StepRecord


@pytest.fixture(scope="session")
def record() -> Callable[..., StepRecord]:
    """`record(step, **changes)`: a record of that step, whose loss is 10 / step."""

    def make(step: int, **changes: object) -> StepRecord:
        values = {
            "step": step,
            "loss": 10 / step,
            "learning_rate": 1e-3,
            "tokens": step * 4096,
            "tokens_per_second": 12_345.0,
            "seconds": step * 0.5,
            "peak_memory_bytes": 3 << 29,
        }
        return StepRecord(**{**values, **changes})

    return make


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`without("tensorboard")`: importing that package fails until the test ends."""

    def remove(package: str) -> None:
        for module in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
            monkeypatch.setitem(sys.modules, module, None)

    return remove
