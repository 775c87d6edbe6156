"""The import rules, each on a small tree of packages that breaks it."""

from pathlib import Path

import pytest
from check_imports import find_problems


def write_module(root: Path, path: str, source: str) -> None:
    """Writes `source` to packages/`path`, in a package that declares torch and PyYAML."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    pyproject = root / path.partition("/")[0] / "pyproject.toml"
    pyproject.write_text('[project]\ndependencies = ["torch>=2.9", "PyYAML>=6.0"]\n')


LAYERS = "nxd-layers/src/nxd_layers/linear.py"
CKPT = "nxd-ckpt/src/nxd_ckpt/save.py"


@pytest.mark.parametrize(
    "source",
    [
        "import json\nimport torch.nn\nimport yaml",
        "from nxd_layers.norm import _scale\nfrom .norm import _eps",
        "import nxd_state\nfrom nxd_state.mesh import Mesh\nprint(Mesh.size, nxd_state.__version__)",
        "def export():\n    import transformers\n    return transformers",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers",
    ],
    ids=["declared", "own_private", "sibling", "inside_function", "for_types"],
)
def test_find_problems_of_allowed_imports_is_empty(tmp_path: Path, source: str) -> None:
    write_module(tmp_path, LAYERS, source)

    assert find_problems(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "source", "problem"),
    [
        (LAYERS, "import nxd_ckpt", "linear.py:1: imports nxd_ckpt, but nxd_layers may import nxd_state"),
        (LAYERS, "def f():\n    from nxd_optim.clip import norm", "linear.py:2: imports nxd_optim.clip"),
        (CKPT, "from nxd_state import Mesh", "nxd_ckpt may import no sibling"),
        (CKPT, "import torch\nif torch.TYPE_CHECKING:\n    import nxd_state", "save.py:3: imports nxd_state"),
        (LAYERS, "from nxd_state._mesh import Mesh", "imports _mesh, which is private to nxd_state"),
        (LAYERS, "from nxd_state.mesh import _axes", "imports _axes, which is private to nxd_state"),
        (LAYERS, "import nxd_state\nnxd_state.mesh._axes()", "linear.py:2: uses nxd_state.mesh._axes"),
        (LAYERS, "from nxd_state import Mesh as M\nM._make()", "linear.py:2: uses M._make"),
        (LAYERS, "import transformers", "linear.py:1: imports transformers at module level"),
        (
            LAYERS,
            "try:\n    from peft import X\nexcept ImportError:\n    pass",
            "imports peft at module level",
        ),
        (LAYERS, "class A:\n    import boto3", "linear.py:2: imports boto3 at module level"),
        ("nxd-new/src/nxd_new/a.py", "", "say in MAY_IMPORT of tools/check_imports.py whom it may import"),
    ],
)
def test_find_problems_of_forbidden_import_names_line(tmp_path: Path, path: str, source: str, problem: str) -> None:
    write_module(tmp_path, path, source)

    [found] = find_problems(tmp_path)

    assert problem in found


def test_find_problems_of_optional_dependency_in_two_files_names_both(tmp_path: Path) -> None:
    lazily = "def f():\n    import transformers"
    write_module(tmp_path, "nxd-layers/src/nxd_layers/hf.py", lazily)
    write_module(tmp_path, LAYERS, lazily)

    [found] = find_problems(tmp_path)

    assert "linear.py:2: imports transformers" in found
    assert "hf.py adapts" in found


def test_find_problems_of_extra_in_its_own_file_is_empty(tmp_path: Path) -> None:
    write_module(tmp_path, "nxd-data/src/nxd_data/template_process.py", "import jinja2")

    assert find_problems(tmp_path) == []


@pytest.mark.parametrize("back", ["from nxd_layers import linear", "def f():\n    from nxd_layers.linear import g"])
def test_find_problems_of_files_that_import_one_another_names_the_circle(tmp_path: Path, back: str) -> None:
    write_module(tmp_path, LAYERS, "from nxd_layers.norm import scale")
    write_module(tmp_path, "nxd-layers/src/nxd_layers/norm.py", back)

    [found] = find_problems(tmp_path)

    assert "imports in a circle" in found
    assert "nxd_layers.linear" in found
    assert "nxd_layers.norm" in found
