"""Another distribution that owns the import name `neuronx_distributed` is named, and nobody else."""

import subprocess
import sys

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
