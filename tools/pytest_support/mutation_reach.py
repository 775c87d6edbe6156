"""The pytest plugin of `tools/mutate.py`: notes which mutations each test reaches, and runs chosen tests in order.

What a fixture of a class, module or session reaches, and its seconds, count for every test that uses the fixture: each
may be the first to use it another time. What is reached
between two tests, by ranks that still tidy up, counts for the later one.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NOT_QUICK = ("slow", "xla", "neuron", "gpu")
COLLECTION = "collection"  # stands for a test, in lines about what collecting the tests has reached
CLOCK_TICK = 0.02  # seconds by which a file may be stamped too early


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mutations")
    group.addoption("--reach-marks", metavar="FOLDER", help="where the markers write")
    group.addoption("--reach-to", metavar="FOLDER", help="where to write which test has reached which mutations")
    group.addoption("--tests-from", metavar="FILE", help="run the tests of these ids, a line each, in their order")
    group.addoption("--progress-to", metavar="FILE", help="where to write which test begins and which has failed")


def pytest_configure(config: pytest.Config) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    distributes = config.getoption("numprocesses", None) and worker == "main"
    if config.option.reach_to and not distributes:
        marks = Path(config.option.reach_marks)
        config.pluginmanager.register(_Reach(marks, worker, Path(config.option.reach_to)))
    if config.option.progress_to:
        config.pluginmanager.register(_Progress(Path(config.option.progress_to)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose and order the tests."""
    if config.option.tests_from:
        places = {test: place for place, test in enumerate(Path(config.option.tests_from).read_text().splitlines())}
        chosen = [item for item in items if item.nodeid in places]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in places])
        items[:] = sorted(chosen, key=lambda item: places[item.nodeid])


class _Progress:
    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, kind: str, test: str) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([kind, test]) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write("collected", str(len(session.items)))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("begins", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write("failed", report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("failed", report.nodeid)


@dataclass(frozen=True)
class _Shared:
    """A fixture of a class, module or session."""

    reached: set[int]
    seconds: float
    first_user: str


class _Reach:
    def __init__(self, marks: Path, worker: str, reach_to: Path) -> None:
        self._marks = marks
        self._worker = worker
        self._path = reach_to / f"{worker}.jsonl"
        self._reached: set[int] = set()
        self._shared: dict[Any, _Shared] = {}  # by fixture
        self._test, self._seconds, self._passed = "", 0.0, True
        (marks / worker).mkdir(exist_ok=True)

    def pytest_collection_finish(self) -> None:
        self._take()
        self._write(COLLECTION, seconds=0.0, alone=0.0, passed=True, quick=True)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        begun = time.time()
        self._test, self._seconds, self._passed = item.nodeid, 0.0, True
        try:
            return (yield)
        finally:
            self._take()
            self._take_unknown(begun)
            alone = self._seconds
            for fixtures in getattr(item, "_fixtureinfo").name2fixturedefs.values():  # noqa: B009 - of pytest itself
                for shared in (self._shared[fixture] for fixture in fixtures if fixture in self._shared):
                    self._reached |= shared.reached
                    alone += shared.seconds if shared.first_user != item.nodeid else 0.0
            quick = not any(item.get_closest_marker(name) for name in NOT_QUICK)
            facts = {"seconds": self._seconds, "alone": alone, "passed": self._passed, "quick": quick}
            self._write(item.nodeid, **facts)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        self._take()
        before, self._reached = self._reached, set()
        begun = time.monotonic()
        try:
            return (yield)
        finally:
            self._take()
            self._shared[fixturedef] = _Shared(self._reached, time.monotonic() - begun, self._test)
            self._reached = before | self._reached

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        self._passed = self._passed and not report.failed

    def _take(self) -> None:
        for mark in list((self._marks / self._worker).iterdir()):
            self._reached.add(int(mark.name))
            mark.unlink()

    def _take_unknown(self, begun: float) -> None:
        """Marks of programs that were not told their worker may be those of each test that runs meanwhile."""
        if self._worker != "main":
            for mark in (self._marks / "main").iterdir():
                with suppress(FileNotFoundError):
                    if mark.stat().st_mtime >= begun - CLOCK_TICK:
                        self._reached.add(int(mark.name))

    def _write(self, test: str, **facts: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"test": test, **facts, "reached": sorted(self._reached)}) + "\n")
        self._reached = set()
