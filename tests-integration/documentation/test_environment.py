"""The page of environment variables has those that the code reads."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Names of NeuronX Distributed that do nothing here.
WITHOUT_EFFECT = {
    "NXD_SKIP_RENDEZVOUS",
    "NXD_LAYOUT_ON_CPU_AND_SERIALIZE",
    "NXD_LAYOUT_ON_DEVICE_AND_SERIALIZE",
    "NXD_LAYOUT_TRANSFORMATION_OPTIONS",
}


def test_page_has_every_variable_of_the_code_and_no_other():
    page = (ROOT / "docs/reference/environment.md").read_text(encoding="utf8")
    sources = [path.read_text(encoding="utf8") for path in ROOT.glob("packages/*/src/**/*.py")]

    read = {name for text in sources for name in re.findall(r"\bNXD_[A-Z_]+\b", text)}

    assert set(re.findall(r"\bNXD_[A-Z_]+\b", page)) == read - WITHOUT_EFFECT
