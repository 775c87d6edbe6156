"""Everything to try on a GPU that one has for ten minutes: numbers, memory, training, checkpoints, errors, speed.

    PYTHONPATH=$(echo packages/*/src | tr ' ' :) python tools/gpu/check.py --json gpu.json

Needs torch 2.11 or newer, transformers and pytest, and what the packages themselves depend on; no network, nothing is
installed. Each part is a process of its own with a limit of time: what it found before it failed is in the table.
`--device cpu` tries the check itself where there is no GPU; its figures say nothing.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gpu_check.rows import Row, table

TOOLS = Path(__file__).resolve().parents[1]
PARTS = {  # seconds that each may take, ten minutes together; the quickest answers first
    "kernels": 60,
    "numbers": 150,
    "training": 90,
    "checkpoints": 45,
    "memory": 45,
    "errors": 60,
    "compiled": 45,
    "speed": 105,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    described = describe_machine(options.device)
    print("\n".join(f"{name}: {value}" for name, value in described.items()), flush=True)
    rows: list[Row] = []
    for part in options.parts:
        begun = time.monotonic()
        found = run_part(part, options.device, PARTS[part] * options.patience)
        rows += found
        print(f"\n{part} ({time.monotonic() - begun:.0f} s)\n{table(found)}", flush=True)
        if options.json is not None:  # after each part, so that what is known is kept whatever happens to the next
            content = {"machine": described, "rows": [asdict(row) for row in rows]}
            options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf8")
    bad = [row for row in rows if row.outcome in ("wrong", "failed")]
    print(f"\n{len(rows)} rows, {len(bad)} of them wrong or failed")
    return 1 if bad else 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies the seconds that a part may take")
    return parser.parse_args(arguments)


def describe_machine(device: str) -> dict[str, str]:
    """What the figures belong to: card, driver, versions."""
    import torch  # noqa: PLC0415 - after the options, as it takes seconds
    import transformers  # noqa: PLC0415

    found = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    if device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("torch sees no CUDA device here; --device cpu tries the check itself")
        found["card"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return found


def run_part(part: str, device: str, seconds: float) -> list[Row]:
    """The rows of a part, and one more that says how it ended, unless it ended well."""
    paths = [str(TOOLS / "gpu"), str(TOOLS), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"NXD_DEVICE": device, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "gpu_check.part", part, device]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment)
        try:
            code, end = process.wait(seconds), ""
        except subprocess.TimeoutExpired:
            process.kill()
            code, end = process.wait(), f"it took longer than {seconds:.0f} s"
        output.seek(0)
        lines = output.read().splitlines()
    rows = [row for row in map(Row.of_line, lines) if row is not None]
    if code:
        last = next((line for line in reversed(lines) if line.strip()), "")
        print("\n".join(line for line in lines if Row.of_line(line) is None), file=sys.stderr)
        rows.append(Row(part, "the part itself", "failed", end or f"exit code {code}: {last}"))
    return rows


if __name__ == "__main__":
    sys.exit(main())
