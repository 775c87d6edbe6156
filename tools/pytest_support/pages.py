"""Runs the code of a Markdown page as a reader would: block by block, in one folder, comparing what the page shows.

    ```python title="train.py"    a file of that name, for commands below; so are toml, json, yaml and bash blocks
    ```python                     a program of its own
    ```console                    commands after `$ `, each followed by what it prints
    ```sh                         commands whose output the page does not show
    ```text                       what the block above prints

A comment `<!-- not run: why -->` above a block exempts it, and `<!-- slow -->` anywhere marks the page as slow. The
python blocks of a page with `<!-- notebook -->` are cells: one process runs them all, and the site has the notebook.
Shown output is compared line by line; `...` stands for anything, also for lines. Numbers may differ by five percent,
and durations, rates and sizes of memory in any way, because they are another machine's.
"""

import fnmatch
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n\n?)?^```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<text>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
# Commands of this environment, as functions: a program started as sys.executable has torch loaded already. torchrun
# takes any free port, since other pages run at the same time; older versions of torch take port 29500 by themselves.
PRELUDE = """set -emo pipefail
python() { "$PAGE_PYTHON" "$@"; }
nxd() { "$PAGE_PYTHON" -m nxd_cli "$@"; }
nxd-ckpt() { "$PAGE_PYTHON" -m nxd_ckpt.cli "$@"; }
torchrun() {
  case " $* " in *" --nnodes"* | *" --rdzv"* | *" --master"*) ;; *) set -- --standalone "$@" ;; esac
  "$PAGE_PYTHON" -m torch.distributed.run "$@"
}
"""
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:e[-+]?\d+)?")
MACHINES_OWN = re.compile(
    r"[-+]?[\d.,:]+[kMG]?\s?(?:s|ms|us|seconds|minutes|tok/s|seq/s|it/s|B|KiB|MiB|GiB|MiB/s)\b|ETA [\d:]+"
)
TOLERANCE = 0.05
END_OF_CELL = "\x1e"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: the word after the fence.
        title: the name of the file that the block is, or an empty string.
        text: the lines between the fences.
        not_run: why it is not run, or an empty string.
        line: its first line's number in the page.
    """

    language: str
    title: str
    text: str
    not_run: str
    line: int


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page's text, in order."""
    found = []
    for match in FENCE.finditer(page):
        title = re.search(r'title="([^"]+)"', match["options"])
        line = page.count("\n", 0, match.start("text")) + 1
        found.append(Block(match["language"], title[1] if title else "", match["text"], match["reason"] or "", line))
    return found


def is_slow(page: str) -> bool:
    """Return whether the page says that its blocks take long."""
    return "<!-- slow -->" in page


def is_notebook(page: str) -> bool:
    """Return whether the page's python blocks are the cells of a notebook."""
    return "<!-- notebook -->" in page


def run_page(page: Path, folder: Path, timeout: float) -> None:
    """Run a page's blocks in `folder`.

    Args:
        page: the Markdown file.
        folder: an empty folder, the working directory of the page's programs.
        timeout: seconds for one command.

    Raises:
        AssertionError: a program fails, or prints something other than the page shows; names the page and the line.
    """
    printed = ""
    text = page.read_text(encoding="utf8")
    blocks = blocks_of(text)
    cells = [block.text for block in blocks if is_cell(block)] if is_notebook(text) else []
    if cells:
        program = f"print({END_OF_CELL!r}, end='')\n".join(cells)
        outputs = iter(_run([sys.executable, "-c", program], folder, timeout, page.name).split(END_OF_CELL))
    for block in blocks:
        where = f"{page.name}:{block.line}"
        if block.not_run:
            printed = ""
        elif block.title:
            file = folder / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf8")
        elif cells and is_cell(block):
            printed = next(outputs)
        elif block.language == "python":
            printed = _run([sys.executable, "-c", block.text], folder, timeout, where)
        elif block.language == "sh":
            printed = _run(["bash", "-c", PRELUDE + block.text], folder, timeout, where)
        elif block.language == "console":
            assert block.text.startswith("$ "), f"{where} is a console block without a command after `$ `"
            for command, shown in _commands(block.text):
                printed = _run(["bash", "-c", PRELUDE + command], folder, timeout, f"{where}: $ {command}")
                if shown:
                    _compare(shown, printed, f"{where}: $ {command}")
        elif block.language == "text" and printed:
            _compare(block.text, printed, where)


def is_cell(block: Block) -> bool:
    """Return whether a block of a notebook's page is a cell."""
    return block.language == "python" and not block.title and not block.not_run


def _commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block, with its continuation lines, and the output shown below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.split("\n")
        length = next(index for index, line in enumerate(lines, 1) if not line.endswith("\\"))
        yield "\n".join(lines[:length]), "\n".join(lines[length:]).strip("\n")


def _run(arguments: list[str], folder: Path, timeout: float, where: str) -> str:
    environment = {**os.environ, "PAGE_PYTHON": sys.executable, "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(
        arguments,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{where} ended with exit code {done.returncode}:\n{done.stdout}"
    return done.stdout


def _compare(shown: str, printed: str, where: str) -> None:
    """Check that the lines a page shows stand in the output, in this order."""
    waiting = iter(printed.splitlines())
    for line in (line for line in shown.splitlines() if line.strip() not in ("", "...")):
        assert any(_matches(line, candidate) for candidate in waiting), (
            f"{where} shows this line, but the output lacks it at this place:\n{line}\n\nIt printed:\n{printed}"
        )


def _matches(shown: str, printed: str) -> bool:
    """Return whether a printed line is the shown one, up to a machine's own figures and rounding."""
    shown, printed = (MACHINES_OWN.sub("#", " ".join(text.split())) for text in (shown, printed))
    words = "*".join(_escaped(part) for part in NUMBER.sub("0", shown).split("..."))
    if not fnmatch.fnmatchcase(NUMBER.sub("0", printed), words):
        return False
    if "..." in shown:
        return True
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(_close(*(float(it.replace(",", "")) for it in pair)) for pair in pairs)


def _escaped(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)


def _close(shown: float, printed: float) -> bool:
    return abs(shown - printed) <= TOLERANCE * max(abs(shown), abs(printed))
