"""Checks that the packages can be released, builds them, and tries each wheel alone.

    python tools/release.py [--base REF] [--check-only]

1. A package whose shipped files (src/, pyproject.toml, README.md) changed since its last release tag
   `<package>-v<version>`, or since --base, has a higher version and a section for it in CHANGELOG.md.
   A package without a base is new and needs the section only.
2. The packages' dependency ranges admit one another's current versions.
3. Wheels and sdists of all packages are built into dist/, and each wheel is installed into a fresh
   environment, its siblings taken from dist/, where its modules are imported.

Needs git and uv. Takes about a minute; leaves the wheels and sdists in dist/ (those of earlier runs are
removed) and nothing else. Publishes and tags nothing. Exits 1 with one line for each problem.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("src", "pyproject.toml", "README.md")


class CommandFailed(Exception):
    """A command of git or uv ended with an error; the message is its last line."""


@dataclass(frozen=True)
class Package:
    """What a release needs to know of one folder below packages/."""

    name: str
    version: Version
    requirements: tuple[Requirement, ...]  # extras included
    modules: tuple[str, ...]
    directory: Path

    @property
    def changelog(self) -> Path:
        """Its list of changes, one `## <version>` section a release."""
        return self.directory / "CHANGELOG.md"


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Runs `command` and returns what it prints.

    Raises:
        CommandFailed: it is not installed or exits non-zero.
    """
    try:
        done = subprocess.run(
            command, cwd=cwd, env=os.environ | (env or {}), capture_output=True, text=True, check=True
        )
    except FileNotFoundError as error:
        raise CommandFailed(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or error.stdout.strip() or "no output").splitlines()[-1]
        raise CommandFailed(f"{' '.join(command[:2])}: {last.strip()}") from error
    return done.stdout


def read_packages(root: Path) -> list[Package]:
    """All packages below `root`/packages, by name."""
    return [read_package(path.parent) for path in sorted(root.glob("packages/*/pyproject.toml"))]


def read_package(directory: Path) -> Package:
    project = tomllib.loads((directory / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional: dict[str, list[str]] = project.get("optional-dependencies", {})
    requirements = [
        *project.get("dependencies", []),
        *(text for texts in optional.values() for text in texts),
    ]
    return Package(
        name=project["name"],
        version=Version(project["version"]),
        requirements=tuple(map(Requirement, requirements)),
        modules=tuple(sorted(path.name for path in directory.glob("src/*") if path.name.isidentifier())),
        directory=directory,
    )


def check_versions(root: Path, packages: Sequence[Package], base: str | None) -> Iterator[str]:
    """Problems with version numbers and changelogs, compared with `base` or each package's last release."""
    for package in packages:
        ref = base or last_release(root, package)
        released = version_at(root, package, ref) if ref else None
        if ref and released:
            if not changed_since(root, package, ref):
                continue
            if package.version <= released:
                yield (
                    f"{package.name}: changed since {ref}, which had version {released}, but its version is "
                    f"{package.version}; raise it in {package.directory.relative_to(root)}/pyproject.toml"
                )
                continue
        if not has_changelog_entry(package):
            yield (
                f"{package.name}: {package.changelog.relative_to(root)} has no section "
                f"'## {package.version}'; add one that says what changed"
            )


def last_release(root: Path, package: Package) -> str | None:
    """The tag of the highest version released from the commits below HEAD."""
    prefix = f"{package.name}-v"
    tags = run("git", "tag", "--list", f"{prefix}*", "--merged", "HEAD", cwd=root).split()
    return max(tags, key=lambda tag: Version(tag.removeprefix(prefix)), default=None)


def version_at(root: Path, package: Package, ref: str) -> Version | None:
    """The package's version at `ref`, None where it did not exist."""
    pyproject = f"{package.directory.relative_to(root)}/pyproject.toml"
    if not run("git", "ls-tree", ref, pyproject, cwd=root):
        return None
    project: dict[str, Any] = tomllib.loads(run("git", "show", f"{ref}:{pyproject}", cwd=root))["project"]
    return Version(project["version"])


def changed_since(root: Path, package: Package, ref: str) -> bool:
    """Whether a file that users get differs between `ref` and the working tree."""
    shipped = [str(package.directory / name) for name in SHIPPED]
    changed = run("git", "diff", "--name-only", ref, "--", *shipped, cwd=root)
    untracked = run("git", "ls-files", "--others", "--exclude-standard", "--", *shipped, cwd=root)
    return bool(changed or untracked)


def has_changelog_entry(package: Package) -> bool:
    """Whether CHANGELOG.md has a section for the version: `## 0.1.0`, in brackets or with a date."""
    if not package.changelog.exists():
        return False
    heading = rf"^## \[?{re.escape(str(package.version))}\]?(\s|$)"
    return re.search(heading, package.changelog.read_text(encoding="utf-8"), re.MULTILINE) is not None


def check_ranges(packages: Sequence[Package]) -> Iterator[str]:
    """Problems with the ranges in which the packages accept one another."""
    versions = {package.name: package.version for package in packages}
    for package in packages:
        for requirement in package.requirements:
            current = versions.get(requirement.name)
            if current and not requirement.specifier.contains(current, prereleases=True):
                yield (
                    f"{package.name}: requires {requirement}, but {requirement.name} is at {current}; widen the range"
                )


def build(packages: Sequence[Package], dist: Path) -> Iterator[str]:
    """Builds each sdist, and from it the wheel, into `dist`; yields what failed."""
    for package in packages:
        for old in dist.glob(f"{package.name.replace('-', '_')}-*"):
            old.unlink()
        try:
            run("uv", "build", "--no-sources", "--out-dir", str(dist), str(package.directory), cwd=dist)
        except CommandFailed as error:
            yield f"{package.name}: cannot be built ({error})"


def install_alone(packages: Sequence[Package], dist: Path) -> Iterator[str]:
    """Installs each wheel of `dist` into an environment of its own and imports it; yields what failed."""
    find_links = ",".join(filter(None, [str(dist), os.environ.get("UV_FIND_LINKS")]))
    for package in packages:
        with tempfile.TemporaryDirectory(prefix="nxd-release-") as scratch:
            python = Path(scratch, "env", "bin", "python")
            wheel = next(dist.glob(f"{package.name.replace('-', '_')}-*.whl"))
            try:
                run("uv", "venv", "--python", sys.executable, "env", cwd=Path(scratch))
                install = ("uv", "pip", "install", "--python", str(python), str(wheel))
                run(*install, cwd=Path(scratch), env={"UV_FIND_LINKS": find_links})
                run(str(python), "-I", "-c", f"import {', '.join(package.modules)}", cwd=Path(scratch))
            except CommandFailed as error:
                yield f"{package.name}: its wheel does not work alone ({error})"


def find_problems(root: Path, *, base: str | None, check_only: bool) -> list[str]:
    """All problems of the checks; where there are none, and unless `check_only`, those of building."""
    packages = read_packages(root)
    problems = [*check_versions(root, packages, base), *check_ranges(packages)]
    if problems or check_only:
        return problems
    dist = root / "dist"
    dist.mkdir(exist_ok=True)
    return list(build(packages, dist)) or list(install_alone(packages, dist))


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="REF", help="compare with this git ref, not with the last release tags")
    parser.add_argument("--check-only", action="store_true", help="do 1 and 2, build nothing")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    try:
        problems = find_problems(root, base=options.base, check_only=options.check_only)
    except CommandFailed as error:
        problems = [str(error)]
    for problem in problems:
        print(problem, file=sys.stderr)
    left = "nothing built" if options.check_only else f"{len(list(root.glob('dist/nxd_*')))} files in dist/"
    print(f"release: {len(problems)} problems, {left}, {time.monotonic() - start:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
