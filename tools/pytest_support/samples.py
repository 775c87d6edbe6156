"""Samples of long lists of cases: the quick session takes some, and `nox -s full` takes all.

`@pytest.mark.sample(3)` on a parametrised test leaves three of its cases quick, each day the next three, so that all
come in turn; the others are marked slow. On a class or a file (`pytestmark`) it draws three of those that the marks
of its tests leave, at random from the date. `@pytest.mark.pairs` on a test with three or more parameters leaves those
cases quick in which every two values of different parameters meet at least once. NXD_TEST_DAY, such as 2026-11-26,
makes it the sample of that day.
"""

import os
import random
from collections.abc import Iterable, Sequence
from datetime import date
from itertools import combinations
from typing import TypeVar

import pytest

Case = TypeVar("Case")


def mark_slow_cases(items: Iterable[pytest.Item]) -> None:
    """Mark the cases slow that the marks `sample` and `pairs` leave out of the quick session."""
    groups: dict[str, tuple[int, pytest.Mark, list[pytest.Item]]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            for depth, node in enumerate(item.listchain()):
                for mark in [mark for mark in node.own_markers if mark.name in ("sample", "pairs")][:1]:
                    groups.setdefault(node.nodeid.partition("[")[0], (depth, mark, []))[2].append(item)
    inner_first = sorted(groups.items(), key=lambda group: -group[1][0])
    for name, (_, mark, members) in inner_first:
        cases = [case for case in members if case.get_closest_marker("slow") is None]
        for case in set(cases) - set(_quick(name, mark, cases)):
            case.add_marker(pytest.mark.slow)


def _quick(name: str, mark: pytest.Mark, cases: list[pytest.Item]) -> list[pytest.Item]:
    """Those of a group's cases that stay quick; `name` is that of a test, a class or a file."""
    if mark.name == "pairs":
        return pairs(cases)
    (count,) = mark.args
    if all(isinstance(case, pytest.Function) and name.endswith(f"::{case.originalname}") for case in cases):
        return of_the_day(cases, count)
    # In turn, it would be in step with the turns within its tests: of some, always the same half.
    return random.Random(f"{_day()} {name}").sample(cases, min(count, len(cases)))


def of_the_day(cases: Sequence[Case], count: int) -> list[Case]:
    """`count` of the cases, in their order: each day the next ones."""
    first = _day().toordinal() * count
    chosen = {(first + index) % len(cases) for index in range(min(count, len(cases)))}
    return [case for index, case in enumerate(cases) if index in chosen]


def _day() -> date:
    return date.fromisoformat(os.environ.get("NXD_TEST_DAY") or date.today().isoformat())


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
