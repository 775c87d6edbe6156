"""Samples of test cases: as many as asked for, and all of them as days go by."""

from datetime import date, timedelta
from pathlib import Path

import pytest
from samples import mark_slow_cases, of_the_day

CASES = list("abcdefghij")
DAYS_OF_ALL_FOUR = ("2026-11-01", "2026-11-02", "2026-11-04", "2026-11-11")  # found by trying
FILE = """
import pytest

@pytest.mark.sample(2)
@pytest.mark.parametrize("number", [0, 1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_of_numbers(number): pass

@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_of_products(tp, bias, dtype): pass

class TestOfAClass:
    pytestmark = pytest.mark.sample(1)

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("letter", ["a", "b"])
    def test_first(self, letter): pass

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("letter", ["a", "b"])
    def test_second(self, letter): pass

def test_alone(): pass
"""


class Collected:
    """A plugin that marks as the repository's conftest does, and notes what would be run."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        mark_slow_cases(items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.nodeid.partition("::")[2] for item in session.items]


def collected(folder: Path, *arguments: str) -> list[str]:
    (folder / "test_cases.py").write_text(FILE)
    plugin = Collected()
    config = Path(__file__).parents[2] / "pyproject.toml"
    pytest.main(["-c", str(config), "--collect-only", "-q", *arguments, str(folder)], plugins=[plugin])
    return plugin.names


@pytest.mark.parametrize("count", [1, 3, 4, 10, 12])
def test_cases_of_as_many_days_as_are_needed_are_all_cases(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    seen = []
    for day in range(-(-len(CASES) // count)):
        monkeypatch.setenv("NXD_TEST_DAY", str(date(2026, 11, 26) + timedelta(days=day)))
        seen.append(of_the_day(CASES, count))

    assert sorted({case for cases in seen for case in cases}) == CASES
    assert {len(cases) for cases in seen} == {min(count, len(CASES))}


def test_quick_are_those_of_the_day_and_all_pairs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    numbers = set()
    for day in ("2026-11-26", "2026-11-27"):
        monkeypatch.setenv("NXD_TEST_DAY", day)
        names = collected(tmp_path, "-m", "not slow")
        numbers |= {name for name in names if "of_numbers" in name}
        products = [name for name in names if "of_products" in name]

        assert sum("of_numbers" in name for name in names) == 2
        assert "test_alone" in names
        assert products == [f"test_of_products[{it}]" for it in ("1-False-float32", "1-True-float64")] + [
            f"test_of_products[{it}]" for it in ("2-False-float64", "2-True-float32")
        ]

    assert numbers == {f"test_of_numbers[{number}]" for number in range(4)}


@pytest.mark.slow
def test_class_takes_from_what_its_tests_leave_and_all_come_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []
    for day in DAYS_OF_ALL_FOUR:
        monkeypatch.setenv("NXD_TEST_DAY", day)
        (of_class,) = (name for name in collected(tmp_path, "-m", "not slow") if "OfAClass" in name)
        seen.append(of_class)

    assert set(seen) == {f"TestOfAClass::test_{test}[{letter}]" for test in ("first", "second") for letter in "ab"}


@pytest.mark.slow
def test_whoever_asks_for_slow_ones_too_has_all(tmp_path: Path) -> None:
    assert len(collected(tmp_path)) == 5 + 8 + 4 + 1
