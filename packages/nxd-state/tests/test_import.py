"""What `import nxd_state` costs over `import torch`."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys, torch
before = set(sys.modules)
import nxd_state
print(json.dumps(sorted(set(sys.modules) - before)))
"""

# The functional collectives of torch, two modules that `import torch` does not load.
TORCH_MODULES = ("torch.distributed._functional_collectives", "torch.distributed.rendezvous")


def test_import_adds_nothing_but_itself_and_the_standard_library(fresh_python):
    result = subprocess.run([fresh_python, "-c", PROGRAM], capture_output=True, text=True, check=True)

    added = json.loads(result.stdout)
    strangers = [
        name
        for name in added
        if name.partition(".")[0] not in {"nxd_state", *sys.stdlib_module_names} and not name.startswith(TORCH_MODULES)
    ]
    assert "nxd_state.collectives.c10d" in added
    assert strangers == []
    assert not any(name.startswith("nxd_testing") for name in added)
