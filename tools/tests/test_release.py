"""The release checks, each on a small repository of two packages in a temporary folder."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from release import main

STATE = "packages/nxd-state"


def git(root: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def write_package(
    root: Path, name: str, *, version: str = "0.1.0", requires: str = "", changes: str = "## 0.1.0\n"
) -> None:
    """Writes a package that hatchling can build; a module of it is named like it."""
    directory = root / "packages" / name
    module = directory / "src" / name.replace("-", "_")
    module.mkdir(parents=True, exist_ok=True)
    (module / "__init__.py").write_text(f"import {requires.partition('>')[0].replace('-', '_') or 'json'}\n")
    (directory / "CHANGELOG.md").write_text(changes)
    (directory / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\nversion = "{version}"\nrequires-python = ">=3.11"\n'
        f"dependencies = {[requires] if requires else []}\n"
        '[build-system]\nrequires = ["hatchling>=1.26"]\nbuild-backend = "hatchling.build"\n'
    )


def write_state(root: Path, *, version: str, changes: str) -> None:
    """The next version of nxd-state: another source file, version and changelog."""
    write_package(root, "nxd-state", version=version, changes=changes)
    (root / STATE / "src/nxd_state/mesh.py").write_text("size = 8\n")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """nxd-state 0.1.0 and nxd-layers 0.1.0, which requires it, committed."""
    write_package(tmp_path, "nxd-state")
    write_package(tmp_path, "nxd-layers", requires="nxd-state>=0.1,<0.2")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "start")
    return tmp_path


@pytest.fixture
def check(repository: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Runs the checks and returns the problems, one a line, having compared them with the exit code."""

    def run_check(*arguments: str) -> list[str]:
        code = main(["--check-only", *arguments], root=repository)
        problems = capsys.readouterr().err.splitlines()
        assert code == (1 if problems else 0)
        return problems

    return run_check


def test_check_of_new_packages_with_changelogs_passes(check: Callable[..., list[str]]) -> None:
    assert check() == []


@pytest.mark.parametrize("changes", ["", "## 0.2.0\n", "0.1.0\n", "## 0.1.0.1\n"])
def test_check_of_new_package_without_changelog_entry_fails(
    repository: Path, check: Callable[..., list[str]], changes: str
) -> None:
    write_package(repository, "nxd-state", changes=changes)

    [problem] = check()

    assert problem.startswith("nxd-state: packages/nxd-state/CHANGELOG.md has no section '## 0.1.0'")


@pytest.mark.parametrize("path", [f"{STATE}/tests/test_mesh.py", f"{STATE}/CHANGELOG.md", "README.md"])
def test_check_of_change_that_is_not_shipped_needs_no_new_version(
    repository: Path, check: Callable[..., list[str]], path: str
) -> None:
    git(repository, "tag", "nxd-state-v0.1.0")
    (repository / path).parent.mkdir(exist_ok=True)
    (repository / path).write_text("changed")

    assert check() == []


@pytest.mark.parametrize("version", ["0.1.0", "0.0.9"])
def test_check_of_change_since_tag_without_higher_version_fails(
    repository: Path, check: Callable[..., list[str]], version: str
) -> None:
    git(repository, "tag", "nxd-state-v0.1.0")
    write_state(repository, version=version, changes=f"## {version}\n")

    problems = check()

    assert problems[0].startswith("nxd-state: changed since nxd-state-v0.1.0, which had version 0.1.0")
    assert f"its version is {version}" in problems[0]


def test_check_of_change_since_tag_without_changelog_entry_fails(
    repository: Path, check: Callable[..., list[str]]
) -> None:
    git(repository, "tag", "nxd-state-v0.1.0")
    write_state(repository, version="0.1.1", changes="## 0.1.0\n")

    [problem] = check()

    assert "has no section '## 0.1.1'" in problem


def test_check_of_change_with_version_and_changelog_entry_passes(
    repository: Path, check: Callable[..., list[str]]
) -> None:
    git(repository, "tag", "nxd-state-v0.1.0")
    write_state(repository, version="0.1.1", changes="# Changes\n\n## [0.1.1] - 2026-01-31\n\n## 0.1.0\n")

    assert check() == []


def test_check_with_two_release_tags_compares_with_the_higher_version(
    repository: Path, check: Callable[..., list[str]]
) -> None:
    git(repository, "tag", "nxd-state-v0.1.0")
    write_package(repository, "nxd-layers", requires="nxd-state>=0.1,<0.20")
    for version in ("0.9.0", "0.10.0"):
        write_state(repository, version=version, changes=f"## {version}\n")
        git(repository, "add", ".")
        git(repository, "commit", "-m", version)
        git(repository, "tag", f"nxd-state-v{version}")
    (repository / STATE / "README.md").write_text("changed")

    [problem] = check()

    assert problem.startswith("nxd-state: changed since nxd-state-v0.10.0")


def test_check_with_base_compares_with_it_instead_of_the_tag(repository: Path, check: Callable[..., list[str]]) -> None:
    write_state(repository, version="0.1.0", changes="## 0.1.0\n")
    git(repository, "add", ".")
    git(repository, "commit", "-m", "a change")
    git(repository, "tag", "nxd-state-v0.1.0")

    [problem] = check("--base", "HEAD~1")

    assert problem.startswith("nxd-state: changed since HEAD~1")


def test_check_with_unknown_base_says_so(check: Callable[..., list[str]]) -> None:
    [problem] = check("--base", "nowhere")

    assert "nowhere" in problem


def test_check_of_range_that_refuses_the_current_version_fails(
    repository: Path, check: Callable[..., list[str]]
) -> None:
    write_state(repository, version="0.2.0", changes="## 0.2.0\n")

    [problem] = check()

    assert problem == ("nxd-layers: requires nxd-state<0.2,>=0.1, but nxd-state is at 0.2.0; widen the range")


def test_check_lists_all_problems(repository: Path, check: Callable[..., list[str]]) -> None:
    for name in ("nxd-state", "nxd-layers"):
        write_package(repository, name, changes="")

    assert [problem.partition(":")[0] for problem in check()] == ["nxd-layers", "nxd-state"]


@pytest.mark.slow
def test_main_builds_wheels_that_install_alone(repository: Path) -> None:
    assert main([], root=repository) == 0

    built = sorted(path.name for path in repository.glob("dist/nxd_*"))
    assert built == [
        "nxd_layers-0.1.0-py3-none-any.whl",
        "nxd_layers-0.1.0.tar.gz",
        "nxd_state-0.1.0-py3-none-any.whl",
        "nxd_state-0.1.0.tar.gz",
    ]


@pytest.mark.slow
def test_main_of_wheel_with_undeclared_dependency_fails(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "packages/nxd-layers/src/nxd_layers/__init__.py").write_text("import undeclared\n")

    assert main([], root=repository) == 1

    assert "nxd-layers: its wheel does not work alone" in capsys.readouterr().err
