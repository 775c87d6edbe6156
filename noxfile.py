"""What a developer or CI runs, one short session each: `nox -l` lists them, plain `nox` runs `tests`.

Nothing here knows a registry or pins a version: ranges live in each package's pyproject.toml, development
tools in the dependency groups of the root pyproject.toml. Sessions see only what they install.
"""

import os
import shutil
from pathlib import Path

import nox
from nox.project import dependency_groups, load_toml
from packaging.requirements import Requirement

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests"]

ROOT = Path(__file__).parent
ROOT_PYPROJECT = load_toml(ROOT / "pyproject.toml")
PYPROJECTS = {path.parent.name: load_toml(path) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}
WHEELS: dict[str, str] = {}  # of what this run of nox has built, by package
BENCHMARKS = sorted(path.stem for path in ROOT.glob("tools/bench/*.py"))

# What sessions install: every package from its sources, what all their tests need, what a backend needs.
SOURCES = [argument for name in PYPROJECTS for argument in ("-e", f"./packages/{name}")]
TEST_REQUIREMENTS = sorted(
    {text for pyproject in (ROOT_PYPROJECT, *PYPROJECTS.values()) for text in dependency_groups(pyproject, "test")}
)
TORCH = next(it for it in map(Requirement, PYPROJECTS["nxd-state"]["project"]["dependencies"]) if it.name == "torch")
TORCH_MINORS = list(TORCH.specifier.filter(f"2.{minor}" for minor in range(100)))
ANYWHERE = "not xla and not neuron and not gpu"
QUICK = f"not slow and {ANYWHERE}"
IN_PARALLEL = ["-n", "auto", "--maxprocesses", "8", "--dist", "worksteal"]
BACKENDS = {
    "cpu": [],
    "xla": ["torch==2.9.1", "torch_xla==2.9.0", "jaxlib>=0.10,<0.11"],  # jaxlib runs a graph on several replicas
    "cuda": [],
    "neuron": ["torch-neuronx", "neuronx-cc"],  # from AWS's index, which that machine's settings must name
}
MARKS = {"cpu": ANYWHERE, "xla": "xla", "cuda": "gpu", "neuron": "neuron"}
DEVICES = {"xla": {"PJRT_DEVICE": "CPU"}, "cuda": {"NXD_DEVICE": "cuda"}, "neuron": {"PJRT_DEVICE": "NEURON"}}
DEVICE_FILES = {"cuda": "/dev/nvidia0", "neuron": "/dev/neuron0"}

os.environ.pop("PYTHONPATH", None)  # else a session could import sources that it did not install
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process of the tests compiles torch anew, for seconds
if "PIP_FIND_LINKS" in os.environ:  # uv does not read pip's variables, and separates by commas
    os.environ.setdefault("UV_FIND_LINKS", ",".join(os.environ["PIP_FIND_LINKS"].split()))


@nox.session
def tests(session: nox.Session) -> None:
    """All unit tests and the quick integration tests, on the sources as they stand, a process per core."""
    session.install(*SOURCES, *TEST_REQUIREMENTS)
    session.run("pytest", "-m", QUICK, *(session.posargs or IN_PARALLEL))


@nox.session
@nox.parametrize("minor", [nox.param(minor, id=minor) for minor in TORCH_MINORS])
def torch(session: nox.Session, minor: str) -> None:
    """The quick tests with one minor version of torch: `nox -s "torch(2.9)"` (large downloads)."""
    session.install(*SOURCES, *TEST_REQUIREMENTS, f"torch=={minor}.*")
    session.run("pytest", "-m", QUICK, *(session.posargs or IN_PARALLEL))


@nox.session
@nox.parametrize("seed", [1, 2, 3])
def random_order(session: nox.Session, seed: int) -> None:
    """The same tests in an order of chance: none may need, or mind, what another one did."""
    session.install(*SOURCES, *TEST_REQUIREMENTS, "pytest-random-order>=1.1")
    session.run("pytest", "-m", QUICK, *IN_PARALLEL, f"--random-order-seed={seed}", *session.posargs)


@nox.session
def full(session: nox.Session) -> None:
    """Before a release: each package's whole suite against its wheel, and all that is slow, in fresh interpreters."""
    os.environ["NXD_TEST_FRESH_INTERPRETERS"] = "1"
    for name in (*(f"unit({package})" for package in PYPROJECTS), "integration(cpu)"):
        session.notify(name, posargs=session.posargs)


@nox.session(reuse_venv=False)
@nox.parametrize("package", [nox.param(name, id=name) for name in PYPROJECTS])
def unit(session: nox.Session, package: str) -> None:
    """One package's tests against its built wheel, with only what it declares installed."""
    session.install(*wheels_for(session, package), *dependency_groups(PYPROJECTS[package], "test"), "pytest-xdist>=3.6")
    test_wheel(session, package, ANYWHERE, *IN_PARALLEL)


@nox.session(venv_backend="uv", reuse_venv=False)
def smoke(session: nox.Session) -> None:
    """Each wheel in turn, with only what it declares installed: it is imported, its README and its main calls run.

    One environment, in which packages are exchanged: torch is installed, and compiled to bytecode, once.
    """
    tmp = Path(session.create_tmp()).resolve()
    for package, pyproject in PYPROJECTS.items():
        wanted, exact = tmp / f"{package}.in", tmp / f"{package}.txt"
        wanted.write_text("\n".join((*wheels_for(session, package), *dependency_groups(pyproject, "test"))))
        session.run_install("uv", "pip", "compile", "--quiet", str(wanted), "--output-file", str(exact))
        session.run_install("uv", "pip", "sync", "--quiet", str(exact))
        test_wheel(session, package, "smoke")


@nox.session
@nox.parametrize("backend", [nox.param(name, id=name) for name in BACKENDS])
def integration(session: nox.Session, backend: str) -> None:
    """What crosses packages, slow tests included: cpu runs all, the others the tests marked so, of every package."""
    if backend in DEVICE_FILES and not Path(DEVICE_FILES[backend]).exists():
        session.skip(f"no such device here ({DEVICE_FILES[backend]} does not exist)")
    session.install(*SOURCES, *TEST_REQUIREMENTS, *BACKENDS[backend])
    arguments = [*IN_PARALLEL, "tests-integration", "tools/tests"] if backend == "cpu" else []
    session.run("pytest", "-m", MARKS[backend], *arguments, *session.posargs, env=DEVICES.get(backend, {}))


@nox.session
def s3(session: nox.Session) -> None:
    """Checkpoints in object stores, with S3 played by moto, well and failing (large download)."""
    nxd_ckpt = PYPROJECTS["nxd-ckpt"]
    extra = nxd_ckpt["project"]["optional-dependencies"]["s3"]
    session.install(*SOURCES, *TEST_REQUIREMENTS, *extra, *dependency_groups(nxd_ckpt, "s3-test"))
    tests = ("stores", "faults/test_s3_faults.py")
    session.run("pytest", *(f"packages/nxd-ckpt/tests/{name}" for name in tests), *session.posargs)


@nox.session
def manifests(session: nox.Session) -> None:
    """The Kubernetes manifests of the site against Kubernetes' schema (large download)."""
    session.install(*SOURCES, *TEST_REQUIREMENTS, *dependency_groups(ROOT_PYPROJECT, "manifests"))
    session.run("pytest", "tests-integration/documentation/test_manifests.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, and who may import whom."""
    session.install(*SOURCES, *dependency_groups(ROOT_PYPROJECT, "lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    session.run("python", "tools/check_imports.py")


@nox.session(venv_backend="uv", reuse_venv=False)
def minimums(session: nox.Session) -> None:
    """The tests with the lowest versions that the packages' ranges, those of extras included, allow."""
    sources = []
    for name, pyproject in PYPROJECTS.items():
        extras = ",".join(pyproject["project"].get("optional-dependencies", {}))
        sources += ["-e", f"./packages/{name}[{extras}]"]
    session.install("--resolution", "lowest-direct", *sources, *TEST_REQUIREMENTS)
    session.run("pytest", "-m", QUICK, *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The site in build/site, with its reference made from the code; a broken link or name fails."""
    session.install(*SOURCES, *dependency_groups(ROOT_PYPROJECT, "docs"))
    session.run("python", "tools/site/build.py")


@nox.session
def demo(session: nox.Session) -> None:
    """Trains a small Llama, resumes it at another layout, writes text and exports it."""
    session.install(*SOURCES, "nxd-trainer[report]")
    session.run("python", "tools/demo.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """The benchmarks in tools/bench, all or those named: `nox -s bench -- tp_step`."""
    session.install(*SOURCES)
    for name in session.posargs or BENCHMARKS:
        session.run("python", f"tools/bench/{name}.py")


@nox.session
def wheels(session: nox.Session) -> None:
    """The release checks; builds every wheel and sdist into dist/ and installs each wheel alone."""
    session.install(*dependency_groups(ROOT_PYPROJECT, "release"))
    session.run("python", "tools/release.py", *session.posargs)


def with_siblings(package: str, *groups: str) -> set[str]:
    """`package` and those of this repository that it, its dependency `groups` and the extras they name need."""
    pyproject = PYPROJECTS[package]
    found, waiting = {package}, [*pyproject["project"]["dependencies"], *dependency_groups(pyproject, *groups)]
    while waiting:
        required = Requirement(waiting.pop())
        if required.name not in PYPROJECTS:
            continue
        project = PYPROJECTS[required.name]["project"]
        if required.name not in found:
            found.add(required.name)
            waiting += project["dependencies"]
        for extra in required.extras:
            waiting += project["optional-dependencies"][extra]
    return found


def wheels_for(session: nox.Session, package: str) -> list[str]:
    """Paths of the wheels of `package` and of what its tests need from this repository, each built once a run."""
    for name in with_siblings(package, "test") - WHEELS.keys():
        directory = Path(session.cache_dir) / "wheels" / name
        shutil.rmtree(directory, ignore_errors=True)
        if session.venv_backend == "uv":
            build = ["uv", "build", "--quiet", "--wheel", "--out-dir"]
        else:
            build = ["pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
        session.run_install(*build, str(directory), str(ROOT / "packages" / name))
        (wheel,) = directory.glob("*.whl")
        WHEELS[name] = str(wheel.resolve())
    return [WHEELS[name] for name in sorted(with_siblings(package, "test"))]


def test_wheel(session: nox.Session, package: str, marks: str, *options: str) -> None:
    """Run the package's tests away from src/, so that the wheel is what gets imported."""
    config, tests = str(ROOT / "pyproject.toml"), str(ROOT / "packages" / package / "tests")
    with session.chdir(session.create_tmp()):
        session.run("pytest", "-c", config, "-m", marks, tests, *options, *session.posargs)
