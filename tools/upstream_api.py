"""Compares the public names of NeuronX Distributed, the library that these packages stand in for, with ours.

    python tools/upstream_api.py read FOLDER    a checkout of aws-neuron/neuronx-distributed into upstream_api.jsonl
    python tools/upstream_api.py write          docs/reference/neuronx-names.md, from that and from the packages

Reading parses the sources and imports nothing of them; only names, arguments and plain defaults are kept. Writing
imports `neuronx_distributed` of these packages. A test writes the table anew and compares it with the one in docs.
"""

import argparse
import ast
import importlib
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nxd_neuronx.unsupported import Unsupported

RELEASE = "2.29"
FACTS = Path(__file__).with_suffix(".jsonl")
TABLE = Path(__file__).parents[1] / "docs/reference/neuronx-names.md"
PACKAGE = "neuronx_distributed"
VALUE = "value"  # what has no signature: constants, enumerations, submodules

# Why a name is not here, by the longest prefix that fits.
REASONS = {
    "": "no script was found that imports it; tell us if yours does",
    "parallel_layers.comm": "use the collectives of nxd_state",
    "parallel_layers.parallel_state.PP_GROUP_PG_GLOO": "a variable; `nxd_state.all_gather_object` sends objects",
    "pipeline.comm": "use `send` and `recv` of nxd_state",
    "pipeline.timeline": "use `NxDPPModel(trace_file_path=...)`",
    "trainer.checkpoint_storage": "use fsspec; `save_checkpoint` takes folders and URLs",
}

# Orders of positional arguments that our functions take as well, as their docstrings say.
TOLD_APART = {
    "scatter_to_tensor_model_parallel_region": ("input_", "process_group"),
    "gather_from_tensor_model_parallel_region": ("input_", "process_group"),
}

INTRODUCTION = """# Public names of NeuronX Distributed, and what they are here

This page compares all {count} public functions, classes and constants of release {release} by name, arguments, their
order and plain defaults. `tools/upstream_api.py` writes it, and a test keeps it current. What changes for a script is
in [Migrate from NeuronX Distributed](../how-to/migrate-from-neuronx.md).

- **same**: takes the same calls, by position and by keyword; some arguments
  [have no effect](neuronx-config.md#arguments-and-variables-without-effect).
- **different**: exists, with the listed differences.
- **explains**: can be imported; using it raises an error that explains why it does nothing here.
- **not here**: cannot be imported.
"""


class Comparison(NamedTuple):
    """What becomes of one public name."""

    state: str  # "same", "different", "explains" or "not here"
    detail: str


def read_facts(folder: Path) -> Iterator[tuple[str, str, Any]]:
    """Public names of a checkout: module, name, and the arguments as [name, kind, default] or `VALUE`."""
    root = folder / "src" / PACKAGE
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if parts[0] != "experimental":  # never released
            names = dict(_public_names(ast.parse(file.read_text())))
            yield from ((module, name, arguments) for name, arguments in names.items())


def _public_names(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, _arguments_of(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and _is_constant(target.id):
                    yield target.id, VALUE


def _is_constant(name: str) -> bool:
    return name.isupper() and not name.startswith("_") and len(name) > 1  # of one letter are type variables


def _arguments_of(node: ast.FunctionDef | ast.ClassDef) -> Any:
    """Those of a function or of a class's constructor; `VALUE` for a class that has none of its own."""
    if isinstance(node, ast.ClassDef):
        made = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        if not made:
            return VALUE
        return _arguments_of(made[-1])[1:]
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    found = [[one.arg, "positional", _default(value)] for one, value in zip(positional, defaults, strict=True)]
    if arguments.vararg:
        found.append([arguments.vararg.arg, "rest", None])
    keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [*found, *([one.arg, "keyword", _default(value)] for one, value in keyword)]


def _default(node: ast.expr | None) -> str | None:
    """A plain value as text, "..." for an expression, None where there is no default."""
    if node is None:
        return None
    try:
        return repr(ast.literal_eval(node))
    except ValueError:
        return "..."


def compare(module: str, name: str, arguments: Any) -> Comparison:
    """A name of theirs with ours."""
    try:
        ours = getattr(importlib.import_module(f"{PACKAGE}.{module}".rstrip(".")), name)
    except (ImportError, AttributeError):
        prefix = max((prefix for prefix in REASONS if f"{module}.{name}".startswith(prefix)), key=len)
        return Comparison("not here", REASONS[prefix])
    if isinstance(ours, Unsupported):
        return Comparison("explains", f"{ours.reason}; use {ours.instead}")
    if arguments == VALUE or not callable(ours) or inspect.isbuiltin(ours):
        return Comparison("same", "")
    differences = list(_differences(arguments, ours))
    return Comparison("different" if differences else "same", "; ".join(differences))


def _differences(arguments: list[list[Any]], ours: Callable[..., Any]) -> Iterator[str]:
    """What a call as theirs would stumble over, or mean otherwise."""
    parameters = inspect.signature(ours).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds and inspect.Parameter.VAR_POSITIONAL in kinds:
        return  # it hands on what it is given
    other_names = getattr(ours, "other_names", {})
    arguments = [[other_names.get(name, name), kind, default] for name, kind, default in arguments]
    lacking = [name for name, kind, _ in arguments if kind != "rest" and name not in parameters]
    if lacking and inspect.Parameter.VAR_KEYWORD not in kinds:
        yield f"no `{'`, `'.join(lacking)}`"
    theirs = [name for name, kind, _ in arguments if kind == "positional" and name not in lacking]
    positional = [name for name, parameter in parameters.items() if parameter.kind in _POSITIONAL]
    orders = [positional, *_other_orders(ours)]
    if all(order[: len(theirs)] != theirs for order in orders):
        yield f"by position: `{', '.join(positional)}`"
    for name, _, default in arguments:
        parameter = parameters.get(name)
        if parameter is not None and default not in (None, "..."):
            yield from _differences_of_default(name, parameter.default, default)


def _other_orders(ours: Callable[..., Any]) -> list[list[str]]:
    """Orders of positional arguments that ours tells apart by their types."""
    order = getattr(getattr(ours, "__init__", None), "other_order", None) or TOLD_APART.get(
        getattr(ours, "__name__", "")
    )
    return [list(order)] if order else []


def _differences_of_default(name: str, ours: Any, theirs: str) -> Iterator[str]:
    if ours is inspect.Parameter.empty:
        yield f"`{name}` must be given"
    elif theirs == "{}" and ours is None:
        return
    elif isinstance(ours, bool | int | float | str | tuple | None):
        if ours != ast.literal_eval(theirs):
            yield f"`{name}={ours!r}`, there `{theirs}`"
    else:
        yield f"`{name}` is `{theirs}` there"


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def table() -> str:
    """All of docs/reference/neuronx-names.md."""
    modules: dict[str, dict[str, Any]] = {}
    for line in FACTS.read_text().splitlines():
        module, name, arguments = json.loads(line)
        modules.setdefault(module, {})[name] = arguments
    lines: list[str] = []
    counts: Counter[str] = Counter()
    for module, names in modules.items():
        compared = {name: compare(module, name, arguments) for name, arguments in names.items()}
        counts.update(comparison.state for comparison in compared.values())
        lines += ["", f"## `{module or PACKAGE}`", "", "| name | here | |", "| --- | --- | --- |"]
        lines += [f"| `{name}` | {state} | {detail} |" for name, (state, detail) in compared.items()]
    summary = [f"| {state} | {counts[state]} |" for state in sorted(counts)]
    introduction = INTRODUCTION.format(count=counts.total(), release=RELEASE)
    return introduction + "\n".join(["", "| state | names |", "| --- | --- |", *summary, *lines]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("read").add_argument("folder", type=Path)
    commands.add_parser("write")
    options = parser.parse_args()
    if options.command == "read":
        lines = [json.dumps(fact, separators=(",", ":")) for fact in read_facts(options.folder)]
        FACTS.write_text("\n".join(lines) + "\n")
    else:
        TABLE.write_text(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
