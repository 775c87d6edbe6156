"""What `import nxd_pipeline` costs over `import torch`."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys, torch
before = set(sys.modules)
import nxd_pipeline
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_import_adds_nothing_but_the_stack_and_the_standard_library(fresh_python):
    result = subprocess.run([fresh_python, "-c", PROGRAM], capture_output=True, text=True, check=True)

    added = {name.partition(".")[0] for name in json.loads(result.stdout)}
    assert added - {"nxd_pipeline", "nxd_state", "torch", *sys.stdlib_module_names} == set()
