"""Another distribution that owns the import name `neuronx_distributed` is named, and so is a missing package."""

import subprocess
import sys
from importlib import import_module

import pytest

pytestmark = pytest.mark.smoke

PROGRAM = "import warnings; warnings.simplefilter('error'); import neuronx_distributed"


def import_beside(folder) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.path.append({str(folder)!r}); {PROGRAM}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_other_owner_of_the_import_name_is_warned_of(tmp_path):
    assert import_beside(tmp_path).returncode == 0

    metadata = tmp_path / "neuronx_distributed-0.12.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: neuronx-distributed\nVersion: 0.12.1\n")
    result = import_beside(tmp_path)

    assert result.returncode == 1
    assert "neuronx-distributed 0.12.1 is installed next to nxd-neuronx" in result.stderr
    assert "pip uninstall neuronx-distributed" in result.stderr


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, ImportError, r"neuronx_distributed\.lightning\.module\.NeuronLTModule .*; pip install nxd-lightning"),
        ("import lightning_of_another_name", ModuleNotFoundError, "No module named 'lightning_of_another_name'"),
    ],
    ids=["the package", "what it imports"],
)
def test_name_of_nxd_lightning_says_which_package_is_missing(tmp_path, monkeypatch, content, error, message):
    if content is None:
        monkeypatch.setitem(sys.modules, "nxd_lightning", None)
    else:
        (tmp_path / "nxd_lightning.py").write_text(content)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "nxd_lightning", raising=False)

    with pytest.raises(error, match=message):
        _ = import_module("neuronx_distributed.lightning.module").NeuronLTModule
