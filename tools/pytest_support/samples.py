"""Samples of long lists of cases: the quick session takes some, others each day, and `nox -s full` takes all."""

import os
from collections.abc import Sequence
from datetime import date
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


def of_the_day(cases: Sequence[Case], count: int) -> list[Case]:
    """`count` of the cases, in their order: each day the next ones, so that all come in turn.

    NXD_TEST_DAY, such as 2026-11-26, makes it the sample of that day.
    """
    day = date.fromisoformat(os.environ.get("NXD_TEST_DAY") or date.today().isoformat()).toordinal()
    chosen = {(day * count + index) % len(cases) for index in range(min(count, len(cases)))}
    return [case for index, case in enumerate(cases) if index in chosen]


def sampled(cases: Sequence[Any], count: int) -> list[Any]:
    """The cases for `parametrize`: those of the day are quick, all others are marked slow."""
    quick = of_the_day(range(len(cases)), count)
    return [case if index in quick else _slow(case) for index, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.slow])
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
