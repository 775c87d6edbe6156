"""Stands in for the Python interpreter of a writer process: counts its calls, then runs what it was asked to.

    counted_python.py -I -c <program> <arguments>, with COUNTED_CALLS = {"log": ..., "points": [...], "how": ...}
"""  # fmt: skip

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from system_calls import Sabotage, SystemCalls

settings = json.loads(os.environ["COUNTED_CALLS"])
_, _, program, *arguments = sys.argv[1:]
sys.argv = ["-c", *arguments]
SystemCalls(1, Path(settings["log"]), Sabotage(frozenset(settings["points"]), settings["how"]))
exec(compile(program, "<writer>", "exec"), {"__name__": "__main__"})
