"""Changes the packages' sources in small ways, one at a time, and tells which changes the tests notice.

    python tools/mutate.py seed --count 100 --seed 7 > mutations.jsonl
    python tools/mutate.py reach --mutations mutations.jsonl --reach reach.jsonl -- -n 2 --dist worksteal
    python tools/mutate.py run --mutations mutations.jsonl --reach reach.jsonl --results results.jsonl --first quick.txt
    python tools/mutate.py table --mutations mutations.jsonl --reach reach.jsonl --results results.jsonl

`reach` runs the quick session once, or the tests of the arguments after `--`, with a marker at each mutation's place,
and so finds the tests that can notice it. `run` takes about half a minute for a mutation that is noticed, and up to
`--budget` seconds for one that is not; it goes on where it was interrupted. Both change the sources of the work tree
that they are in, and restore them; have a work tree for each that runs, with `nox -s tests --install-only` done.
"""

import argparse
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from mutation.sites import Mutation, apply, mark, seed

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = ROOT / "tools/pytest_support"
# The configuration is named, or pytest would look for it at the paths among the plugin's options.
PYTEST = [
    str(ROOT / ".nox/tests/bin/python"),
    "-m",
    "pytest",
    "-c",
    str(ROOT / "pyproject.toml"),
    "-p",
    "mutation_reach",
]
QUICK = "not slow and not xla and not neuron and not gpu"  # as in noxfile.py
COLLECTION = "collection"  # as in mutation_reach.py
SECONDS_TO_START = 120.0  # until the first test begins
SECONDS_OF_A_TEST = 60.0  # more than the ten times of what it took in `reach`
SECONDS_WITHOUT_PROGRAMS = 0.1
NOTHING_RAN = 5  # pytest's exit code


@dataclass(frozen=True)
class Test:
    """What `reach` has seen of a test; `alone` are its seconds with those of fixtures that other tests use, too."""

    test: str
    seconds: float
    alone: float
    passed: bool
    quick: bool
    reached: list[int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for call in (write_seed, write_reach, write_results, print_table):
        command = commands.add_parser(call.__name__.partition("_")[2].replace("results", "run"), help=call.__doc__)
        command.set_defaults(call=call)
        if call is write_seed:
            command.add_argument("--count", type=int, default=100)
            command.add_argument("--seed", type=int, default=7)
            continue
        command.add_argument("--mutations", type=Path, required=True, help="what `seed` has written")
        command.add_argument("--reach", type=Path, required=True, help="a line for each test")
        if call is write_reach:
            command.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
            continue
        command.add_argument("--results", type=Path, required=True, help="a line for each mutation")
        if call is write_results:
            command.add_argument("--first", type=Path, help="ids of the tests to be run first, a line each")
            command.add_argument("--only-tests", type=Path, help="ids of the only tests to be run, a line each")
            command.add_argument(
                "--budget", type=float, default=600.0, help="seconds of tests, at most, for a mutation"
            )
    os.environ.pop("PYTHONPATH", None)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests of it fail where it is ignored, as after nohup
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which restores the sources
    arguments = parser.parse_args()
    arguments.call(arguments)


def write_seed(arguments: argparse.Namespace) -> None:
    """choose mutations"""
    for mutation in seed(ROOT, arguments.count, arguments.seed):
        print(json.dumps(asdict(mutation)))


def write_reach(arguments: argparse.Namespace) -> None:
    """find the tests that reach each mutation; tests that were seen before and are not run now keep their lines"""
    by_file = defaultdict(list)
    for mutation in read_mutations(arguments.mutations):
        by_file[mutation.file].append(mutation)
    with tempfile.TemporaryDirectory(prefix="nxd-reach-") as folder, own_tree():
        marks, lines = Path(folder, "marks"), Path(folder, "lines")
        for path in (marks / "main", lines):
            path.mkdir(parents=True)
        with changed({file: mark((ROOT / file).read_text(), found) for file, found in by_file.items()}):
            options = ["--reach-marks", str(marks), "--reach-to", str(lines)]
            chosen = arguments.pytest if "-m" in arguments.pytest else ["-m", QUICK, *arguments.pytest]
            with plugin(f"import mutation_marker; mutation_marker.install({str(marks)!r})"):
                subprocess.run([*PYTEST, *options, *chosen], cwd=ROOT, check=False)
        written = [line for path in sorted(lines.iterdir()) for line in read_lines(path)]
    seen = {line["test"] for line in written} - {COLLECTION}
    kept = read_lines(arguments.reach) if arguments.reach.exists() else []
    written += [line for line in kept if line["test"] not in seen]
    arguments.reach.write_text("".join(json.dumps(line) + "\n" for line in written))


def write_results(arguments: argparse.Namespace) -> None:
    """find the test that notices each mutation"""
    mutations, tests = read_mutations(arguments.mutations), read_reach(arguments.reach)
    first = set(arguments.first.read_text().splitlines()) if arguments.first else set()
    only = set(arguments.only_tests.read_text().splitlines()) if arguments.only_tests else None
    unknown = (first | (only or set())) - {test.test for test in tests}
    print(f"{len(unknown)} of the tests that are named were not seen by `reach`: {sorted(unknown)[:3]}", flush=True)
    done = {result["id"] for result in read_lines(arguments.results)} if arguments.results.exists() else set()
    with own_tree(), plugin():
        for mutation in mutations:
            if mutation.id not in done:
                reaching = [test for test in reaching_tests(mutation, tests) if only is None or test.test in only]
                result = killer(mutation, reaching, first, arguments.budget)
                with arguments.results.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                print(json.dumps(result), flush=True)
        killers = {result["killed_by"] for result in read_lines(arguments.results)}
        batches, _ = in_batches([test for test in tests if test.test in killers], set(), float("inf"))
        failed = [test for _, batch in batches for test in run_tests(batch, stop_at_first=False)["failed"]]
        print(f"tests that noticed a mutation and fail without any: {failed}")


def reaching_tests(mutation: Mutation, tests: list[Test]) -> list[Test]:
    """Those that pass without the mutation, fastest first.

    What is reached while tests are collected may matter to any test, and is taken to matter to those of the package.
    """
    package = mutation.file.partition("/src/")[0] + "/tests/"
    early = any(test.test == COLLECTION and mutation.id in test.reached for test in tests)
    found = [
        test
        for test in tests
        if test.passed and (mutation.id in test.reached or (early and test.test.startswith(package)))
    ]
    return sorted((test for test in found if test.test != COLLECTION), key=lambda test: test.alone)


def killer(mutation: Mutation, reaching: list[Test], first: set[str], budget: float) -> dict[str, Any]:
    """The line of results about a mutation: the first failure, first among the tests of `first`."""
    began, ran = time.monotonic(), 0
    result: dict[str, Any] = {"id": mutation.id, "killed_by": None, "in_first": False, "why": None}
    source = (ROOT / mutation.file).read_text()
    batches, left = in_batches(reaching, first, budget)
    with changed({mutation.file: apply(source, mutation)}):
        for in_first, batch in batches:
            outcome = run_tests(batch, stop_at_first=True)
            ran += outcome["begun"]
            if outcome["why"]:
                killed_by = outcome["failed"][0] if outcome["failed"] else outcome["why"]
                result |= {"killed_by": killed_by, "in_first": in_first, "why": outcome["why"]}
                break
    seconds = round(time.monotonic() - began, 1)
    return {**result, "reaching": len(reaching), "ran": ran, "left": left, "seconds": seconds}


def in_batches(tests: list[Test], first: set[str], budget: float) -> tuple[list[tuple[bool, list[Test]]], int]:
    """Batches of tests, with whether they are of `first`, and how many tests are left out.

    Of those of `first`, and of the others, as many are taken as fit the budget; very fast tests have a batch of their
    own, for which no servers are started.
    """
    batches, taken = [], 0
    for in_first in (True, False):
        chosen, seconds = [], 0.0
        for test in (test for test in tests if (test.test in first) == in_first):
            seconds += test.seconds
            if seconds <= budget:
                chosen.append(test)
        taken += len(chosen)
        for very_fast in (True, False):
            batches.append((in_first, [test for test in chosen if is_very_fast(test) == very_fast]))
    return [(in_first, batch) for in_first, batch in batches if batch], len(tests) - taken


def is_very_fast(test: Test) -> bool:
    """Whether a test is so fast that it cannot start programs."""
    return test.alone < SECONDS_WITHOUT_PROGRAMS


def run_tests(tests: list[Test], *, stop_at_first: bool) -> dict[str, Any]:
    """Run tests in one process.

    Returns:
        why: how it was noticed that the sources are wrong, or None; failed: ids of tests; begun: their number.
    """
    with tempfile.TemporaryDirectory(prefix="nxd-mutation-") as folder:
        chosen, progress, output = Path(folder, "tests"), Path(folder, "progress"), Path(folder, "output")
        chosen.write_text("".join(f"{test.test}\n" for test in tests))
        files = list(dict.fromkeys(test.test.partition("::")[0] for test in tests))
        options = ["--tests-from", str(chosen), "--progress-to", str(progress), "-q"]
        options += ["--basetemp", f"{folder}/tmp", "-p", "no:cacheprovider", *(["-x"] if stop_at_first else [])]
        fresh = str(int(all(is_very_fast(test) for test in tests)))
        with output.open("w") as file:
            process = subprocess.Popen(
                [*PYTEST, *options, *files],
                cwd=ROOT,
                env={**os.environ, "NXD_TEST_FRESH_INTERPRETERS": fresh},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            hangs_in = wait(process, progress, {test.test: test.alone for test in tests})
        finally:
            with contextlib.suppress(ProcessLookupError):  # its forks end with it, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines: list[list[str]] = read_lines(progress) if progress.exists() else []
        failed = list(dict.fromkeys(test for kind, test in lines if kind == "failed"))
        begun = sum(kind == "begins" for kind, _ in lines)
        if hangs_in is not None:
            return {"why": "time limit", "failed": [hangs_in], "begun": begun}
        if not stop_at_first or failed:
            return {"why": "failed" if failed else None, "failed": failed, "begun": begun}
        if process.returncode not in (0, NOTHING_RAN):
            return {"why": f"pytest ended with {process.returncode}", "failed": [], "begun": begun}
        if begun < len(tests):
            print(f"{len(tests) - begun} tests were not found: {chosen.read_text()[:200]!r}", flush=True)
        return {"why": None, "failed": [], "begun": begun}


def wait(process: "subprocess.Popen[bytes]", progress: Path, seconds: dict[str, float]) -> str | None:
    """Wait until pytest ends; the id of a test that takes too long, or "start", if it does not end."""
    current, since = "start", time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        lines = progress.read_text().splitlines() if progress.exists() else []
        begun = [test for kind, test in map(json.loads, lines) if kind == "begins"]
        if begun and begun[-1] != current:
            current, since = begun[-1], time.monotonic()
        limit = SECONDS_OF_A_TEST + 10 * seconds[current] if current in seconds else SECONDS_TO_START
        if time.monotonic() - since > limit:
            return current
    return None


def print_table(arguments: argparse.Namespace) -> None:
    """print, by operator and package, how many mutations the tests notice"""
    mutations, tests = read_mutations(arguments.mutations), read_reach(arguments.reach)
    results = {result["id"]: result for result in read_lines(arguments.results)}
    kinds = {
        "operator": lambda mutation: mutation.operator,
        "package": lambda mutation: mutation.file.split("/")[1],
        "": lambda _: "all",
    }
    print("| of | seeded | reached | run | noticed | by the tests named first | tests left out |")
    print("|---|---|---|---|---|---|---|")
    for kind, name_of in kinds.items():
        for name in sorted({name_of(mutation) for mutation in mutations}):
            chosen = [mutation for mutation in mutations if name_of(mutation) == name]
            known = [results[mutation.id] for mutation in chosen if mutation.id in results]
            killed = [result for result in known if result["killed_by"]]
            reached = sum(bool(reaching_tests(mutation, tests)) for mutation in chosen)
            in_first = sum(result["in_first"] for result in killed)
            open_ones = sum(bool(result["left"]) and not result["killed_by"] for result in known)
            numbers = (len(chosen), reached, len(known), len(killed), in_first, open_ones)
            print(f"| {f'{kind} ' * bool(kind)}{name} | {' | '.join(map(str, numbers))} |")


@contextlib.contextmanager
def own_tree() -> Iterator[None]:
    """Refuse a work tree that is in use or has changes."""
    git = ["git", "-C", str(ROOT)]
    with (ROOT / ".nox/mutate.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refuse(f"another mutate.py changes the sources of {ROOT}; use a work tree for each")
        if subprocess.check_output([*git, "status", "--porcelain", "--", "packages"]):
            refuse(f"the packages of {ROOT} have changes that are not committed; commit or stash them")
        yield


def refuse(reason: str) -> NoReturn:
    raise SystemExit(f"mutate.py: {reason}")


@contextlib.contextmanager
def changed(texts: dict[str, str]) -> Iterator[None]:
    """Sources with these texts.

    Python knows compiled files by the seconds and the size of their source, so each text gets a time of its own.
    """
    kept = {ROOT / file: ((ROOT / file).read_bytes(), (ROOT / file).stat()) for file in texts}
    try:
        for file, text in texts.items():
            (ROOT / file).write_text(text)
            stamp = zlib.crc32(text.encode()) % (1 << 30)
            os.utime(ROOT / file, (stamp, stamp))
        yield
    finally:
        for path, (data, status) in kept.items():
            path.write_bytes(data)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@contextlib.contextmanager
def plugin(line: str = "") -> Iterator[None]:
    """Let every interpreter of the environment find the pytest plugin, and run a line when it starts."""
    (site_packages,) = (ROOT / ".nox/tests").glob("lib/python*/site-packages")
    path = site_packages / "nxd_mutation.pth"
    path.write_text(f"{SUPPORT}\n{line}\n")
    try:
        yield
    finally:
        path.unlink()


def read_mutations(path: Path) -> list[Mutation]:
    return [Mutation(**line) for line in read_lines(path)]


def read_reach(path: Path) -> list[Test]:
    return [Test(**line) for line in read_lines(path)]


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
