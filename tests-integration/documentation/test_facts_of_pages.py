"""What pages list by hand is all there is."""

import re
from pathlib import Path

import nxd_state

ROOT = Path(__file__).parents[2]


def test_getters_of_the_page_on_ranks_are_those_that_exist():
    page = (ROOT / "docs/reference/ranks-and-groups.md").read_text(encoding="utf8")
    documented = set(re.findall(r"`(get_\w+)(?:\(|`)", page))
    exported = {name for name in nxd_state.__all__ if name.startswith("get_")}
    assert documented == exported


def test_tests_of_the_page_on_promises_exist():
    page = (ROOT / "docs/reference/checkpoint-promises.md").read_text(encoding="utf8")
    paths = re.findall(r"`(tests[\w/.-]+)`", page)
    assert len(paths) > 40
    package = ROOT / "packages/nxd-ckpt"
    assert [path for path in paths if not (package / path).exists() and not (ROOT / path).exists()] == []
