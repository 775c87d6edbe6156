"""Mutations: what is found in a source and what is left alone, markers, and the tests that reach and notice them."""

import ast
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import mutate
import mutation_reach
import pytest
from mutation.sites import Mutation, apply, find, mark, seed, shares

FILE = "packages/nxd-state/src/nxd_state/mesh.py"
SOURCE = '''"""A module of which -1 and rank + 1 are no mutations."""

import torch
import torch.distributed as dist

LIMIT = 3 - 1


def reduced(tensor: torch.Tensor, tp_rank: int, tp_size: int, limit: int = -1) -> torch.Tensor:
    """Not 2 + 2."""
    if tp_rank < 0:
        raise ValueError(f"tp_rank={tp_rank - 1} is negative")
    dist.all_reduce(
        tensor,
    )
    if tensor.dtype == torch.float64 and (limit or
                                          tp_rank):
        return -tensor[tp_rank : tp_size - 1]
    return tensor.float() if limit else tensor * 2


def __repr__() -> str:
    return "é" + str(1 - 2)
'''
# By what they replace and put there.
EXPECTED = {
    ("skip a check", "tp_rank < 0", "((tp_rank < 0) and False)"),
    ("off by one", "tp_rank < 0", "tp_rank <= 0"),
    ("off by one", "0", "1"),
    ("swap a rank", "tp_rank", "(tp_size - 1 - tp_rank)"),
    ("drop a sum", "dist.all_reduce(\n        tensor,\n    )", "pass\n\n"),
    ("wrong dtype", "torch.float64", "torch.float32"),
    ("flip a sign", "-tensor[tp_rank : tp_size - 1]", "(tensor[tp_rank : tp_size - 1])"),
    ("flip a sign", "tp_size - 1", "tp_size + 1"),
    ("off by one", "1", "2"),
    ("wrong dtype", "tensor.float()", "tensor.bfloat16()"),
    ("invert a condition", "limit", "(not (limit))"),
    ("flip a sign", "tensor * 2", "tensor // 2"),
}


def numbered(source: str) -> list[Mutation]:
    return [replace(mutation, id=number) for number, mutation in enumerate(find(source, FILE))]


def test_mutations_of_a_source_are_those_of_its_code() -> None:
    found = {(mutation.operator, mutation.before, mutation.after) for mutation in find(SOURCE, FILE)}

    assert {kinds for kinds in found if "limit or" not in kinds[1]} == EXPECTED
    assert {operator for operator, before, _ in found if "limit or" in before} == {"invert a condition"}


def test_mutated_and_marked_sources_keep_their_lines_and_mean_something_else() -> None:
    mutations = numbered(SOURCE)
    one_of_each_place = list({mutation.span: mutation for mutation in mutations}.values())

    for changed in (*(apply(SOURCE, mutation) for mutation in mutations), mark(SOURCE, one_of_each_place)):
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))
        assert changed.count("\n") == SOURCE.count("\n")


def test_mutation_of_another_source_is_refused() -> None:
    mutation = next(find(SOURCE, FILE))

    with pytest.raises(ValueError, match="seed anew"):
        apply(f"\n{SOURCE}", mutation)


def test_same_seed_chooses_the_same_mutations_of_all_packages(tmp_path: Path) -> None:
    for package, number in (("nxd-state", 5), ("nxd-ckpt", 1)):
        path = tmp_path / FILE.replace("nxd-state", package)
        path.parent.mkdir(parents=True)
        path.write_text(SOURCE * number)

    chosen = seed(tmp_path, 12, 7)

    assert chosen == seed(tmp_path, 12, 7) != seed(tmp_path, 12, 8)
    assert [mutation.id for mutation in chosen] == list(range(12))
    assert len({mutation.operator for mutation in chosen}) == 7
    assert sorted(mutation.file.split("/")[1] for mutation in chosen) == ["nxd-ckpt"] * 2 + ["nxd-state"] * 10


def test_shares_have_two_each_and_the_sum_that_is_asked_for() -> None:
    assert shares({"a": 1, "b": 1, "c": 98}, 20) == {"a": 2, "b": 2, "c": 16}
    with pytest.raises(ValueError, match="use 6 or more"):
        shares({"a": 1, "b": 1, "c": 98}, 5)


def test_quick_tests_are_those_of_nox() -> None:
    noxfile = (mutate.ROOT / "noxfile.py").read_text()

    assert f'ANYWHERE = "{mutate.QUICK.removeprefix("not slow and ")}"' in noxfile
    assert " and ".join(f"not {name}" for name in mutation_reach.NOT_QUICK) == mutate.QUICK
    assert mutate.COLLECTION == mutation_reach.COLLECTION


LIBRARY = '''"""Doubles, and halves in a process of its own."""

import subprocess
import sys


def doubled(number: int) -> int:
    return number + number


def halved(number: int) -> int:
    program = f"import library; print(library.of_program({number}))"
    return int(subprocess.check_output([sys.executable, "-c", program]))


def of_program(number: int) -> int:
    if number < 0:
        raise ValueError("negative")
    while number > 100:
        number = number - 100
    return number // 2
'''
TESTS = """
import time

import pytest
from library import doubled, halved


@pytest.fixture(scope="module")
def four():
    time.sleep(0.2)
    return doubled(2)


def test_doubled():
    assert doubled(2) == 4


def test_halved():
    assert halved(8) == 4


def test_large():
    assert halved(104) == 2


@pytest.mark.slow
def test_four(four):
    assert four > 3


def test_four_again(four):
    assert four


def test_broken():
    assert halved(8) == 5
"""


@pytest.fixture
def small_repository(tmp_path: Path, fresh_python: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with an environment, a library and its tests, which `mutate` works on."""
    root = tmp_path / "repository"
    files = {
        "packages/small/src/library.py": LIBRARY,
        "packages/small/tests/test_library.py": TESTS,
        "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow', 'xla', 'neuron', 'gpu']",
        ".gitignore": ".nox\n__pycache__\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    environment = root / ".nox/tests"
    subprocess.run([fresh_python, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (installed,) = (path for path in sys.path if path.endswith("site-packages"))
    (site_packages / "a_sources.pth").write_text(
        f"{root}/packages/small/src\nimport site; site.addsitedir({installed!r})\n"
    )
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *command], check=True)
    python = str(environment / "bin/python")
    without = ["-p", "no:cacheprovider", "-p", "no:nxd_testing.pytest_plugin"]  # which loads torch
    options = ["-m", "pytest", "-c", str(root / "pyproject.toml"), "-p", "mutation_reach", *without]
    monkeypatch.setattr(mutate, "ROOT", root)
    monkeypatch.setattr(mutate, "PYTEST", [python, *options])
    monkeypatch.chdir(root)
    return root


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["mutate.py", *arguments])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    mutate.main()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.slow
def test_mutations_are_reached_and_noticed_by_the_tests_that_call_them(
    small_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / name) for name in ("mutations", "reach", "results", "first")]
    mutations, reach, results, first = files
    library = small_repository / "packages/small/src/library.py"
    by_text = {
        "sum": Mutation(0, "flip a sign", "packages/small/src/library.py", 8, 11, 8, 26, "number + number", "5"),
        "check": Mutation(1, "skip a check", "packages/small/src/library.py", 17, 7, 17, 17, "number < 0", "False"),
        "loop": Mutation(
            2, "flip a sign", "packages/small/src/library.py", 20, 17, 20, 29, "number - 100", "number - 50"
        ),
    }
    Path(mutations).write_text("".join(json.dumps(asdict(found)) + "\n" for found in by_text.values()))
    of_module = "packages/small/tests/test_library.py::"
    Path(first).write_text(f"{of_module}test_doubled\n{of_module}test_four_again\n{of_module}test_gone\n")
    shared = ("--mutations", mutations, "--reach", reach)

    run(monkeypatch, "reach", *shared, "--", "-m", "not xla", "-n", "1")
    run(monkeypatch, "run", *shared, "--results", results, "--first", first)
    run(monkeypatch, "table", *shared, "--results", results)

    seen = {test.test.removeprefix(of_module): test for test in mutate.read_reach(Path(reach))}
    reached = {name: test.reached for name, test in seen.items()}
    assert reached == {
        "collection": [],
        "test_doubled": [0],
        "test_halved": [1],
        "test_large": [1, 2],
        "test_four": [0],
        "test_four_again": [0],
        "test_broken": [1],
    }
    assert {name for name, test in seen.items() if test.alone - test.seconds > 0.1} == {"test_four_again"}
    assert {name for name, test in seen.items() if not test.passed} == {"test_broken"}
    assert {name for name, test in seen.items() if not test.quick} == {"test_four"}
    found = {result["id"]: result for result in mutate.read_lines(Path(results))}
    killers = {number: (result["killed_by"], result["in_first"], result["why"]) for number, result in found.items()}
    assert killers == {
        0: (f"{of_module}test_doubled", True, "failed"),
        1: (None, False, None),
        2: (f"{of_module}test_large", False, "failed"),
    }
    assert "| all | 3 | 3 | 3 | 2 | 1 | 0 |" in capsys.readouterr().out
    assert library.read_text() == LIBRARY


def test_test_that_takes_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutate, "SECONDS_OF_A_TEST", 0.1)
    progress = tmp_path / "progress"
    progress.write_text('["collected", "2"]\n["begins", "test_a"]\n["begins", "test_b"]\n')
    process = subprocess.Popen(["sleep", "1000"])
    try:
        assert mutate.wait(process, progress, {"test_a": 0.0, "test_b": 0.01}) == "test_b"
    finally:
        process.kill()
        process.wait()


def test_sources_with_changes_are_refused(
    small_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = small_repository / "packages/small/src/library.py"
    library.write_text(LIBRARY + "# changed\n")
    (tmp_path / "mutations").write_text("")

    with pytest.raises(SystemExit, match="commit or stash"):
        run(monkeypatch, "reach", "--mutations", str(tmp_path / "mutations"), "--reach", str(tmp_path / "reach"))
