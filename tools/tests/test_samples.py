"""Samples of test cases: as many as asked for, and all of them in turn."""

from datetime import date, timedelta

import pytest
from samples import of_the_day, sampled

CASES = list("abcdefghij")


@pytest.mark.parametrize("count", [1, 3, 4, 10, 12])
def test_cases_of_as_many_days_as_are_needed_are_all_cases(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    seen = []
    for day in range(-(-len(CASES) // count)):
        monkeypatch.setenv("NXD_TEST_DAY", str(date(2026, 11, 26) + timedelta(days=day)))
        seen.append(of_the_day(CASES, count))

    assert sorted({case for cases in seen for case in cases}) == CASES
    assert {len(cases) for cases in seen} == {min(count, len(CASES))}


def test_cases_that_are_not_of_the_day_are_slow_and_keep_their_names_and_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_TEST_DAY", "2026-11-26")
    cases = [pytest.param(number, id=f"case {number}", marks=pytest.mark.xla) for number in range(5)]

    found = sampled(cases, 2)

    marks = {case.values: [mark.name for mark in case.marks] for case in found}
    of_day = [case.values for case in of_the_day(cases, 2)]
    assert [case.id for case in found] == [case.id for case in cases]
    assert {values: names == ["xla"] for values, names in marks.items()} == {
        case.values: case.values in of_day for case in cases
    }
    assert all(names == ["xla", "slow"] for values, names in marks.items() if values not in of_day)


def test_plain_values_and_tuples_become_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_TEST_DAY", "2026-11-26")

    slow = [case for case in sampled([1, (2, 3)], 0) if case.marks]

    assert [case.values for case in slow] == [(1,), (2, 3)]
