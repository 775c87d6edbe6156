"""Notebooks made from pages that say `<!-- notebook -->`, executed in a Jupyter kernel, with their outputs.

A page's text becomes Markdown cells and its python blocks code cells. The outputs that the page shows are left out: the
notebook has those of its own run.
"""

import re
import tempfile

import nbformat
from nbclient import NotebookClient
from pages import FENCE, is_notebook

OUTPUT = re.compile(r"\s*```text\n.*?^```\n?", re.MULTILINE | re.DOTALL)
LINK_TO_PAGE = re.compile(r"\[([^\]]+)\]\((?!\w+:)[^)]+\)")
SECONDS_PER_CELL = 600


def notebook_pages(pages: dict[str, str]) -> dict[str, str]:
    """Return the notebook of each of these pages that is one, and the page with a link to it.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
    """
    made = {}
    for page, text in pages.items():
        if is_notebook(text):
            file = page.removesuffix(".md") + ".ipynb"
            made[file] = executed(text)
            made[page] = text.replace(
                "<!-- notebook -->", f"[Download this page as a notebook]({file.rpartition('/')[2]})\n"
            )
    return made


def executed(page: str) -> str:
    """Return a page as the JSON of a notebook, after its cells have run in a folder of their own."""
    notebook = nbformat.v4.new_notebook(metadata={"language_info": {"name": "python"}})
    end = 0
    for block in FENCE.finditer(page):
        if block["language"] == "python" and not block["reason"]:
            notebook.cells += [*_prose(page[end : block.start()]), nbformat.v4.new_code_cell(block["text"].strip())]
            end = block.end()
    notebook.cells += _prose(page[end:])
    with tempfile.TemporaryDirectory() as folder:
        metadata = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=SECONDS_PER_CELL, kernel_name="python3", resources=metadata).execute()
    return nbformat.writes(notebook)


def _prose(text: str) -> list[nbformat.NotebookNode]:
    """Return the Markdown cell between two code cells; links to pages are text, since the notebook leaves the site."""
    text = LINK_TO_PAGE.sub(
        r"\1", OUTPUT.sub("\n", text).replace("<!-- notebook -->", "").replace("<!-- slow -->", "")
    ).strip()
    return [nbformat.v4.new_markdown_cell(text)] if text else []
