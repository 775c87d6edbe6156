"""Checks who imports whom in packages/*/src, reading the sources without importing them.

    python tools/check_imports.py

Takes about a second and leaves nothing behind; exits 1 and names each line that breaks one of five rules:

1. A package imports only those of its siblings that `MAY_IMPORT` lists for it.
2. It uses no sibling's underscore names.
3. At module level it imports only what its pyproject.toml declares in `dependencies`. Everything else is an
   optional dependency, imported inside the function that needs it.
4. An optional dependency is imported in one file of the package, the one that adapts it.
5. Files do not import one another in a circle, inside functions neither.
"""

import ast
import sys
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from packaging.requirements import Requirement

PIECES = {"nxd_state", "nxd_ckpt", "nxd_layers", "nxd_lora", "nxd_pipeline", "nxd_optim"}
MAY_IMPORT: dict[str, set[str]] = {
    "nxd_state": set(),
    "nxd_lora": {"nxd_state", "nxd_layers"},
    "nxd_parity": set(),  # it must be usable alone, too
    "nxd_plan": PIECES | {"nxd_cli", "nxd_engine"},
    "nxd_elastic": PIECES | {"nxd_cli", "nxd_engine"},
    "nxd_doctor": {"nxd_state", "nxd_cli"},
    "nxd_cli": {"nxd_state"},
    "nxd_neuronx": PIECES | {"nxd_cli", "nxd_trace", "nxd_engine"},
    "nxd_engine": PIECES,
    "nxd_testing": {"nxd_state", "nxd_doctor"},
    "nxd_ckpt": set(),  # it must be usable alone
    "nxd_layers": {"nxd_state"},
    "nxd_pipeline": {"nxd_state"},
    "nxd_optim": {"nxd_state"},
    "nxd_trace": {"nxd_state"},
    "nxd_data": {"nxd_state"},
    "nxd_trainer": PIECES
    | {"nxd_data", "nxd_trace", "nxd_engine", "nxd_neuronx", "nxd_cli", "nxd_doctor", "nxd_elastic", "nxd_plan"}
    | {"nxd_parity"},
    "nxd_lightning": {"nxd_state", "nxd_engine", "nxd_data"},
    "nxd_hf_trainer": {"nxd_state", "nxd_layers", "nxd_pipeline", "nxd_engine"},
    "neuronx_distributed": PIECES | {"nxd_trace", "nxd_engine", "nxd_neuronx"},
}

# Files that users reach only through an extra may import that extra's dependencies at module level.
EXTRAS_AT_MODULE_LEVEL = {
    "nxd_data/template_process.py": {"jinja2"},  # a program, which nothing imports
    "nxd_parity/pytest_plugin.py": {"pytest"},  # which pytest imports
}

IMPORT_NAMES = {"pyyaml": "yaml"}  # where it is not the distribution's name with underscores

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Import:
    """One imported module, the names taken from it, the names that it binds, and where it stands."""

    module: str
    taken: tuple[str, ...]
    bound: tuple[str, ...]
    line: int
    inside_function: bool
    for_types: bool

    @property
    def top(self) -> str:
        """The top-level package imported."""
        return self.module.partition(".")[0]


@dataclass(frozen=True)
class Source:
    """One file: the import package that it lies in, its syntax tree, and its absolute imports."""

    path: Path
    package: str
    tree: ast.Module
    imports: tuple[Import, ...]

    @property
    def sibling_imports(self) -> list[Import]:
        """Imports of the other packages of this repository."""
        return [found for found in self.imports if found.top in MAY_IMPORT and found.top != self.package]


def read_source(path: Path, package: str) -> Source:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return Source(path, package, tree, tuple(imports_below(tree)))


def imports_below(node: ast.AST, *, inside_function: bool = False, for_types: bool = False) -> Iterator[Import]:
    """The absolute imports in `node`; `for_types` marks those under `if TYPE_CHECKING`."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            bound = alias.asname or alias.name.partition(".")[0]
            yield Import(alias.name, (), (bound,), node.lineno, inside_function, for_types)
    elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        taken = tuple(alias.name for alias in node.names)
        names = tuple(alias.asname or alias.name for alias in node.names)
        yield Import(node.module, taken, names, node.lineno, inside_function, for_types)
    inside_function = inside_function or isinstance(node, FUNCTIONS)
    guarded = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else []
    for child in ast.iter_child_nodes(node):
        yield from imports_below(child, inside_function=inside_function, for_types=for_types or child in guarded)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_accesses(source: Source) -> Iterator[tuple[str, int]]:
    """`module._name` and `Class._name`, with the line, where the first name came from a sibling."""
    siblings = {name for found in source.sibling_imports for name in found.bound}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            expression = ast.unparse(node)
            if expression.partition(".")[0] in siblings:
                yield expression, node.lineno


def sibling_problems(source: Source) -> Iterator[str]:
    """Rules 1 and 2."""
    allowed = MAY_IMPORT[source.package]
    for found in source.sibling_imports:
        where = f"{source.path}:{found.line}"
        if found.top not in allowed:
            permitted = ", ".join(sorted(allowed)) or "no sibling"
            yield f"{where}: imports {found.module}, but {source.package} may import {permitted}"
        private = [name for name in (*found.module.split("."), *found.taken) if is_private(name)]
        if private:
            yield f"{where}: imports {', '.join(private)}, which is private to {found.top}"
    for expression, line in private_accesses(source):
        yield f"{source.path}:{line}: uses {expression}, which is private to another package"


def optional_problems(sources: list[Source], declared: set[str]) -> Iterator[str]:
    """Rules 3 and 4, over all files of one package."""
    ours = declared | MAY_IMPORT.keys() | sys.stdlib_module_names
    adapters: dict[str, Path] = {}
    for source in sources:
        location = source.path.as_posix().rpartition("/src/")[2]
        extras = [names for prefix, names in EXTRAS_AT_MODULE_LEVEL.items() if location.startswith(prefix)]
        permitted = set().union(*extras)
        for found in source.imports:
            if found.for_types or found.top in ours | permitted:
                continue
            where = f"{source.path}:{found.line}"
            if not found.inside_function:
                yield (
                    f"{where}: imports {found.top} at module level, but the package's `dependencies` "
                    "lack it; declare it, or import it inside the function that needs it"
                )
            adapter = adapters.setdefault(found.top, source.path)
            if adapter != source.path:
                yield f"{where}: imports {found.top}, which {adapter} adapts; call that file instead"


def circle_problems(sources: list[Source]) -> Iterator[str]:
    """Rule 5, over all packages: the first circle that there is."""
    files = {module_name(source.path): source for source in sources}
    graph = {
        name: {imported for found in source.imports if not found.for_types for imported in modules_of(found, files)}
        for name, source in files.items()
    }
    try:
        TopologicalSorter({name: imported - {name} for name, imported in graph.items()}).prepare()
    except CycleError as error:
        yield f"{files[error.args[1][0]].path}: imports in a circle: {' <- '.join(error.args[1])}"


def module_name(path: Path) -> str:
    """Of a file below `src`, such as "nxd_state.collectives" for its `__init__.py`."""
    parts = path.with_suffix("").parts
    return ".".join(parts[parts.index("src") + 1 :]).removesuffix(".__init__")


def modules_of(found: Import, files: Collection[str]) -> set[str]:
    """The files that an import loads: a name that is taken may be a file below the module."""
    below = {f"{found.module}.{name}" for name in found.taken}
    named = {name for name in below if name in files}
    return named | ({found.module} & set(files) if len(named) < len(below) or not below else set())


def declared_imports(pyproject: Path) -> set[str]:
    """The import names of what a package declares in `dependencies`."""
    with pyproject.open("rb") as file:
        requirements = tomllib.load(file)["project"]["dependencies"]
    names = [Requirement(text).name.lower() for text in requirements]
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}


def find_problems(packages: Path) -> list[str]:
    """Every breach of the rules under `packages`, as `file:line: what` lines."""
    problems: list[str] = []
    everything: list[Source] = []
    for pyproject in sorted(packages.glob("*/pyproject.toml")):
        roots = [path for path in sorted(pyproject.parent.glob("src/*")) if path.name.isidentifier()]
        unknown = [path for path in roots if path.name not in MAY_IMPORT]
        problems += [f"{path}: say in MAY_IMPORT of tools/check_imports.py whom it may import" for path in unknown]
        known = [path for path in roots if path not in unknown]
        sources = [read_source(path, root.name) for root in known for path in sorted(root.rglob("*.py"))]
        for source in sources:
            problems += sibling_problems(source)
        problems += optional_problems(sources, declared_imports(pyproject))
        everything += sources
    return [*problems, *circle_problems(everything)]


def main() -> int:
    problems = find_problems(Path(__file__).resolve().parents[1] / "packages")
    print("\n".join([*problems, f"import rules: {len(problems)} problems found"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
