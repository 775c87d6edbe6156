"""Reference pages made from the code: recipe keys, commands, the API, error messages.

Each `*_pages` function returns Markdown by its path in the site.
"""

import ast
import contextlib
import io
import os
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from unittest import mock

from architectures import architecture_pages
from nxd_cli.dispatch import COMMANDS, main
from nxd_trainer.recipe import Recipe, recipe_keys

ROOT = Path(__file__).parents[2]
# The page that helps with a message, by a phrase of the message. The build fails if either no longer exists.
HELP = {
    "does not divide world_size": "how-to/choose-a-layout.md",
    "did not reach": "how-to/hangs-and-failed-ranks.md",
    "ranks reached different collectives": "how-to/hangs-and-failed-ranks.md",
    "gradients are not finite": "how-to/troubleshooting.md",
    "nxd parity --hf": "how-to/numbers-differ.md",
    "the replicas are no longer equal": "how-to/numbers-differ.md",
    "context parallelism": "reference/limits.md#context-parallelism",
    "pipeline_cuts": "how-to/own-pipeline-stages.md",
    "shard_spec": "explanation/logical-tensors.md",
    "without its base model": "how-to/fine-tune-with-lora.md",
    "belongs to another run": "how-to/troubleshooting.md#resuming",
    "is not a checkpoint of nxd train": "how-to/resume-and-stop.md",
    "need another package: pip install": "how-to/store-checkpoints-elsewhere.md",
    "chat template": "how-to/fine-tune-on-conversations.md",
    "data.column": "how-to/prepare-data.md",
    "trust_code=False": "reference/serving-endpoints.md#saved-models-from-strangers",
    "needs torch-xla": "how-to/inspect-a-graph.md",
    "pip install": "how-to/install.md",
}
MODULES_OF_API = {"nxd-trainer": "nxd_trainer.parity"}  # where it is not the package's own
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


def reference_pages() -> dict[str, str]:
    """Return all made pages."""
    return {**key_pages(), **command_pages(), **api_pages(), **error_pages(), **architecture_pages()}


def key_pages() -> dict[str, str]:
    """Return the page of recipe keys: a table for each section."""
    lines = [
        "# Recipe keys",
        "",
        "A recipe is a TOML, YAML or JSON file with these keys. Each is also a flag of `nxd train`, `nxd data`, "
        "`nxd plan`, `nxd parity` and `nxd doctor --graph`, as in `--train.steps 100` or `train.steps=100`.",
    ]
    sections = groupby(recipe_keys().values(), key=lambda key: key.section)
    for section, keys in sections:
        meaning = (type(getattr(Recipe(), section)).__doc__ or "").splitlines()[0] if section else ""
        lines += ["", f"## [{section}]" if section else "## Top level", "", meaning, ""]
        lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        for key in keys:
            default = "unset" if key.default is None else f"`{key.default}`"
            kind = key.type_name.replace("|", "\\|")
            lines.append(f"| `{key.name}` | {kind} | {default} | {key.description} |")
    return {"reference/recipe-keys.md": "\n".join(lines)}


def command_pages() -> dict[str, str]:
    """Return the page of commands: what each prints for `--help`."""
    names = [[name] for name in COMMANDS]
    subcommands = re.search(r"\{([a-z,]+)\}", _help(["ckpt"]))
    assert subcommands is not None
    at = names.index(["ckpt"])
    names[at + 1 : at + 1] = [["ckpt", name] for name in subcommands[1].split(",")]
    texts = [_help(name) for name in names]
    lines = ["# Commands", "", "What each command prints for `--help`, without the [recipe keys](recipe-keys.md).", ""]
    for name, text in zip(names, texts, strict=True):
        package = COMMANDS[name[0]].package
        level = "#" * (len(name) + 1)
        lines += [
            f"{level} nxd {' '.join(name)}",
            "",
            f"From `pip install {package}`.",
            "",
            "```text",
            re.sub(r"\n\[model\]:.*?(?=\nexit codes:|\nexamples:)", "", text, flags=re.DOTALL),
            "```",
            "",
        ]
    return {"reference/commands.md": "\n".join(lines)}


def _help(command: list[str]) -> str:
    """Return what `nxd COMMAND --help` prints."""
    printed = io.StringIO()
    wide = mock.patch.dict(os.environ, COLUMNS="100", NO_COLOR="1")
    with wide, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return printed.getvalue()


def api_pages() -> dict[str, str]:
    """Return a page for each package: what its `__all__` names, with docstrings."""
    pages = {}
    for package in PACKAGES:
        module = MODULES_OF_API.get(package, package.replace("-", "_"))
        if _public_names(module):
            pages[f"reference/api/{package}.md"] = (
                f"# {package}\n\n::: {module}\n    options:\n      show_root_heading: {str('.' in module).lower()}\n"
            )
    return pages


def _public_names(module: str) -> list[str]:
    tree = ast.parse(_source(module).joinpath("__init__.py").read_text(encoding="utf8"))
    return [
        ast.literal_eval(node)
        for statement in tree.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__"
        for node in ast.walk(statement.value)
        if isinstance(node, ast.Constant)
    ]


def _source(module: str) -> Path:
    package, *below = module.split(".")
    return Path(ROOT, "packages", package.replace("_", "-"), "src", package, *below)


def error_pages() -> dict[str, str]:
    """Return a page for each package: the messages of its errors, with names in braces for values."""
    index = [
        "# Error messages",
        "",
        "The messages of the packages' errors, from their sources; names in braces stand for values. The search "
        "finds a message by its words. An arrow leads to the page that helps.",
        "",
    ]
    pages = {}
    used = set()
    for package in PACKAGES:
        lines = [f"# Errors of {package}", ""]
        folder = _source(package.replace("-", "_"))
        for file in sorted(folder.rglob("*.py")):
            messages = sorted(set(_messages(file)))
            if messages:
                lines += [f"## {file.relative_to(_source(package.replace('-', '_')))}", ""]
                for kind, message in messages:
                    phrase = next((phrase for phrase in HELP if phrase in message), None)
                    used.add(phrase)
                    lines.append(f"- `{kind}`: {_as_text(message)}{_link_to_help(phrase)}")
                lines.append("")
        if len(lines) > 2:
            pages[f"reference/errors/{package}.md"] = "\n".join(lines)
            index.append(f"- [{package}](errors/{package}.md)")
    if lost := HELP.keys() - used:
        raise ValueError(f"no message has the phrases {sorted(lost)} of HELP in {Path(__file__).name}; mend them")
    return {"reference/errors.md": "\n".join(index), **pages}


def _link_to_help(phrase: str | None) -> str:
    """Return an arrow to the page that helps with messages of this phrase, named by the page's title."""
    if phrase is None:
        return ""
    page = ROOT / "docs" / HELP[phrase].partition("#")[0]
    title = page.read_text(encoding="utf8").splitlines()[0].removeprefix("# ")
    return f" → [{title}](../../{HELP[phrase]})"


def _messages(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the type and the message of each error that is raised with a text."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = _template(node.exc.args[0])
            if text and " " in text:
                yield ast.unparse(node.exc.func), text


def _template(node: ast.expr) -> str:
    """Return the text of a string expression, with `{name}` for what is formatted into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            "{" + ast.unparse(part.value) + "}" if isinstance(part, ast.FormattedValue) else _template(part)
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return ""


def _as_text(message: str) -> str:
    """Return a message that Markdown shows as it is."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(message.split()))
