"""Builds the site: docs/, the READMEs and the pages made from the code, as HTML that also opens from a folder.

    python tools/site/build.py

A broken link, an unknown name or a notebook that fails ends the build. Leaves build/pages and build/site.

The drawings in docs/pictures are committed, so that they also show on the code host. `python tools/site/drawings.py`
makes the SVG files again; `tools/tests/test_drawings.py` fails if they are not those that the code makes today.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools/pytest_support"))  # the harness knows a page's blocks
from drawings import drawings  # noqa: E402
from notebooks import notebook_pages  # noqa: E402
from reference import reference_pages  # noqa: E402

BUILD = ROOT / "build"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def main() -> int:
    """Write the pages and build the site."""
    shutil.rmtree(BUILD / "pages", ignore_errors=True)
    sources = page_sources()
    for source, page in sources.items():
        if is_picture(page):
            write(page, (ROOT / source).read_bytes())
    written = {page: linked(source, sources) for source, page in sources.items() if not is_picture(page)}
    pictures = {f"pictures/{name}": picture for name, picture in drawings().items()}
    for page, text in {**written, **notebook_pages(written), **reference_pages(), **pictures}.items():
        write(page, text.encode())
    config = shutil.copy(Path(__file__).with_name("mkdocs.yml"), BUILD)
    named = set(re.findall(r"[\w/-]+\.md", Path(config).read_text(encoding="utf8")))
    if lost := sorted(page for page in sources.values() if not is_picture(page) and page not in named):
        print(f"the navigation in tools/site/mkdocs.yml lacks {', '.join(lost)}", file=sys.stderr)
        return 1
    return subprocess.run(["zensical", "build", "--clean", "--strict", "-f", config], check=False).returncode


def page_sources() -> dict[str, str]:
    """Return the pages and pictures of the site by the repository's files that they come from."""
    docs = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/**/*")) if path.is_file()]
    readmes = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("packages/*/README.md"))]
    return {
        "README.md": "index.md",
        "CONTRIBUTING.md": "contributing.md",
        **{readme: readme.removesuffix("/README.md") + ".md" for readme in readmes},
        **{file: file.removeprefix("docs/") for file in docs},
    }


def is_picture(page: str) -> bool:
    """Return whether this file of docs/ is not text."""
    return not page.endswith(".md")


def linked(source: str, sources: dict[str, str]) -> str:
    """Return a page's text with its links to files of the repository turned into links between pages."""
    folder = PurePosixPath(sources[source]).parent

    def to_page(match: re.Match[str]) -> str:
        file = os.path.normpath(PurePosixPath(source).parent / match[1])
        return os.path.relpath(sources[file], folder) if file in sources else match[1]

    return LINK.sub(to_page, (ROOT / source).read_text(encoding="utf8"))


def write(page: str, content: bytes) -> None:
    """Write one file below build/pages."""
    path = BUILD / "pages" / page
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
