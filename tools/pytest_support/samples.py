"""Samples of long lists of cases: the quick session takes some, and `nox -s full` takes all.

`@pytest.mark.sample(3)` on a parametrised test, a class or a file (`pytestmark`) leaves three of its cases quick,
each day the next three, so that all come in turn; the others are marked slow. `@pytest.mark.pairs` on a test with three
or more parameters leaves those cases quick in which every two values of different parameters meet at least once.
NXD_TEST_DAY, such as 2026-11-26, makes it the sample of that day.
"""

import os
from collections.abc import Iterable, Sequence
from datetime import date
from itertools import combinations
from typing import TypeVar

import pytest

Case = TypeVar("Case")


def mark_slow_cases(items: Iterable[pytest.Item]) -> None:
    """Mark the cases slow that the marks `sample` and `pairs` leave out of the quick session."""
    groups: dict[str, tuple[pytest.Mark, list[pytest.Item]]] = {}
    for item in items:
        for node in reversed(item.listchain()):  # the nearest mark counts
            marks = [mark for mark in node.own_markers if mark.name in ("sample", "pairs")]
            if marks and item.get_closest_marker("slow") is None:
                groups.setdefault(node.nodeid.partition("[")[0], (marks[0], []))[1].append(item)
                break
    for mark, cases in groups.values():
        quick = pairs(cases) if mark.name == "pairs" else of_the_day(cases, *mark.args)
        for case in set(cases) - set(quick):
            case.add_marker(pytest.mark.slow)


def of_the_day(cases: Sequence[Case], count: int) -> list[Case]:
    """`count` of the cases, in their order: each day the next ones."""
    day = date.fromisoformat(os.environ.get("NXD_TEST_DAY") or date.today().isoformat()).toordinal()
    chosen = {(day * count + index) % len(cases) for index in range(min(count, len(cases)))}
    return [case for index, case in enumerate(cases) if index in chosen]


def pairs(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Few of the cases, chosen greedily, among which each two values meet that meet in any of them."""
    pairs_of = {case: set(combinations(_values(case), 2)) for case in cases}
    missing = set().union(*pairs_of.values())
    chosen = set()
    while missing:
        best = max(cases, key=lambda case: len(pairs_of[case] & missing))
        chosen.add(best)
        missing -= pairs_of[best]
    return [case for case in cases if case in chosen]


def _values(case: pytest.Item) -> list[tuple[str, str]]:
    """What a case is called with, by name."""
    assert isinstance(case, pytest.Function)
    return sorted((name, repr(value)) for name, value in case.callspec.params.items())
