"""The harness that runs pages notices what is wrong with one."""

from pathlib import Path

import pytest
from pages import blocks_of, is_slow, run_page


def run(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    folder = tmp_path / "folder"
    folder.mkdir()
    run_page(page, folder, timeout=60)


def test_blocks_have_language_title_line_and_reason() -> None:
    first, second = blocks_of(
        '# A\n\n```toml title="a.toml"\nx = 1\n```\n\n<!-- not run: needs Slurm -->\n```sh\nsbatch\n```\n'
    )

    assert (first.language, first.title, first.text, first.line) == ("toml", "a.toml", "x = 1\n", 4)
    assert (second.language, second.not_run, second.line) == ("sh", "needs Slurm", 9)


def test_page_writes_files_runs_commands_and_compares_output(tmp_path: Path) -> None:
    run(
        '```python title="a.py"\nprint("loss", 1.02)\n```\n\n'
        "```console\n$ python a.py\nloss 1.00\n$ echo took 3 s, 4 GiB\ntook 7.1 s, 9 GiB\n"
        "$ echo 1,020 of 30000\n1,000 of 30,000\n```\n",
        tmp_path,
    )


@pytest.mark.parametrize(
    "text",
    [
        "```python\nraise SystemExit(3)\n```\n",
        "```console\n$ false\n```\n",
        "```console\n$ echo loss 1.2\nloss 1.0\n```\n",
        "```console\n$ echo one\ntwo\n```\n",
        "```python\nprint('a')\nprint('b')\n```\n\n```text\nb\na\n```\n",
        "```sh\nfalse | cat\n```\n",
        "```console\n$ echo 3, 4\n3 4\n```\n",
        "```console\n$ echo 12\n1,2\n```\n",
        "```console\nloss 1.0\n```\n",
    ],
    ids=["exit code", "command", "number", "word", "order", "pipe", "comma", "digits", "no command"],
)
def test_page_with_a_mistake_fails(text: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"page\.md:\d"):
        run(text, tmp_path)


def test_ellipsis_stands_for_anything_and_exempted_block_is_not_run(tmp_path: Path) -> None:
    run(
        "```console\n$ echo a; echo b 17; echo c\na\n...\nc\n$ echo b 17 x\nb ...\n```\n\n"
        "<!-- not run: why -->\n```sh\nfalse\n```\n",
        tmp_path,
    )


def test_slow_page_says_so() -> None:
    assert is_slow("<!-- slow -->\n# A page")
    assert not is_slow("# A page that is slow")


def test_cells_of_a_notebook_share_names_and_are_compared_one_by_one(tmp_path: Path) -> None:
    cells = "<!-- notebook -->\n```python\nx = 4\nprint(x)\n```\n\n```text\n4\n```\n\n```python\nprint(x + 1)\n```\n"

    run(f"{cells}\n```text\n5\n```\n", tmp_path)
    (tmp_path / "folder").rmdir()
    with pytest.raises(AssertionError, match=r"page\.md:\d"):
        run(f"{cells}\n```text\n4\n```\n", tmp_path)
