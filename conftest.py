"""What all tests of the repository have: interpreters that start quickly, deadlines, and a look at what tests leave.

Programs that tests start as `sys.executable` are forks of a server that has torch loaded (`fork_server`), unless
NXD_TEST_FRESH_INTERPRETERS=1. Deadlines are those of an idle machine of today times
NXD_TESTING_SLOWNESS, which is measured here.
"""

import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "tools/pytest_support"))

import fork_server
from leaks import left_behind, observe
from samples import mark_slow_cases

SECONDS_TO_START = 0.012  # an interpreter without site-packages, on an idle machine of today
SECONDS_TO_VANISH = 1.0  # for what is on its way out when a test ends: a process, a thread that closes sockets
FRESH_INTERPRETER = pytest.StashKey[str]()
OWN_FOLDER = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Measure the machine and start the fork servers, once for all processes of the session."""
    config.stash[FRESH_INTERPRETER] = sys.executable
    if not hasattr(config, "workerinput"):
        if config.option.basetemp is None:  # pytest's own folder is emptied by the user's next sessions but three
            config.option.basetemp = config.stash[OWN_FOLDER] = tempfile.mkdtemp(prefix="nxd-tests-")
        os.environ.setdefault("NXD_TEST_DAY", date.today().isoformat())  # the same for all workers, at midnight too
        os.environ.setdefault("NXD_TESTING_SLOWNESS", f"{measure_slowness():.2f}")
        if os.environ.get("NXD_TEST_FRESH_INTERPRETERS") != "1":
            os.environ["NXD_TEST_PYTHON"] = start_fork_servers(config)
    let_examples_take_their_time()
    if "NXD_TEST_PYTHON" in os.environ and not config.getoption("numprocesses", None):  # tests run in this process
        sys.executable = os.environ["NXD_TEST_PYTHON"]


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick are only those cases of long lists whose turn it is."""
    mark_slow_cases(items)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """The tests' own folder goes at the end, unless there is something to look at."""
    if exitstatus == pytest.ExitCode.OK and OWN_FOLDER in session.config.stash:
        session.config.add_cleanup(lambda: shutil.rmtree(session.config.stash[OWN_FOLDER], ignore_errors=True))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Give the interpreter its name back; pytest may have been called by a program."""
    sys.executable = config.stash[FRESH_INTERPRETER]


def let_examples_take_their_time() -> None:
    """Hypothesis fails an example that takes 200 ms, which says more of the machine than of the code."""
    if find_spec("hypothesis") is not None:
        from hypothesis import settings  # noqa: PLC0415 - not every package's tests need it

        settings.register_profile("any-machine", deadline=None)
        settings.load_profile("any-machine")


def measure_slowness() -> float:
    """How many times longer this machine needs to start an interpreter than an idle one of today; at least 1."""
    seconds = []
    for _ in range(5):
        begun = time.monotonic()
        subprocess.run([os.path.realpath(sys.executable), "-SEs", "-c", "pass"], check=True)
        seconds.append(time.monotonic() - begun)
    return max(1.0, statistics.median(seconds) / SECONDS_TO_START)


def start_fork_servers(config: pytest.Config) -> str:
    """The path of the executable that asks them; they end with the session."""
    folder = tempfile.TemporaryDirectory(prefix="nxd-test-python-")
    config.add_cleanup(folder.cleanup)
    executable, servers = fork_server.start(Path(folder.name))
    for server in servers:
        config.add_cleanup(server.wait)
        config.add_cleanup(server.stdin.close)
    config.add_cleanup(lambda: os.environ.pop("NXD_TEST_PYTHON"))
    return str(executable)


@pytest.fixture(scope="session")
def deadline() -> Callable[[float], float]:
    """`deadline(10)`: what takes 10 s at most on an idle machine of today, in seconds of this one."""
    return lambda seconds: seconds * float(os.environ["NXD_TESTING_SLOWNESS"])


@pytest.fixture(scope="session")
def fresh_python(request: pytest.FixtureRequest) -> str:
    """The interpreter itself, which programs need that ask what is imported, how they end, or what they call."""
    return request.config.stash[FRESH_INTERPRETER]


@pytest.fixture
def fresh_interpreter(fresh_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started as `sys.executable` is the interpreter itself."""
    monkeypatch.setattr(sys, "executable", fresh_python)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test that leaves anything in the process; this fixture is the first to begin and the last to end."""
    before = observe()
    yield
    left = left_behind(before, observe())
    give_up = time.monotonic() + SECONDS_TO_VANISH * float(os.environ["NXD_TESTING_SLOWNESS"])
    while left and time.monotonic() < give_up:
        gc.collect()
        time.sleep(0.01)
        left = left_behind(before, observe())
    if left:
        lines = "\n  ".join(left)
        pytest.fail(f"{request.node.nodeid} left behind:\n  {lines}", pytrace=False)
