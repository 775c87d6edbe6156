"""`nxd train` as a person calls it: it learns, it goes on after a stop bit for bit, its checkpoint writes text."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from gpu_check.rows import Row, check

STEPS = 20
SETTINGS = [
    *("model.hidden_size=128", "model.intermediate_size=256", "model.num_hidden_layers=2"),
    *("model.num_attention_heads=4", "model.num_key_value_heads=2", "data.path=text.txt", "data.sequence_length=128"),
    *("train.global_batch_size=8", f"train.steps={STEPS}", "optimizer.lr=3e-3"),
]


def rows(device: str) -> Iterator[Row]:
    """Rows of one run, of a run in two parts, of bfloat16, of generation, and of two devices where there are two."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = (Path(json.__file__).parent / "decoder.py").read_text(encoding="utf8")
        (folder / "text.txt").write_text(text * 20, encoding="utf8")
        once = train(folder, "once")
        yield Row("training", "float32 learns", "ok" if once[-1] < once[0] - 1 else "wrong", _fall(once))
        train(folder, "twice", f"train.stop_after={STEPS // 2}")
        twice = train(folder, "twice")
        largest = max(abs(a - b) for a, b in zip(once, twice, strict=True))
        yield check("training", "a run in two parts", largest, 0.0 if device == "cpu" else 1e-5)
        half = train(folder, "half", "train.dtype=bfloat16", "parallel.zero_stage=1")
        yield Row("training", "bfloat16, ZeRO-1, learns", "ok" if half[-1] < half[0] - 1 else "wrong", _fall(half))
        text = run_nxd(folder, "generate", "once/checkpoints", "--prompt", "def ", "--max-new-tokens", "16").stdout
        yield Row("training", "generate", "ok" if len(text) > len("def ") else "wrong", repr(text[:40]))
        if device == "cuda" and torch.cuda.device_count() >= 2:
            split = train(folder, "split", "--nproc", "2", "parallel.tensor_parallel_size=2")
            yield check("training", "TP 2 by NCCL", max(abs(a - b) for a, b in zip(once, split, strict=True)), 1e-2)


def train(folder: Path, output: str, *settings: str) -> list[float]:
    """Run `nxd train` to its end, and return the loss of each step from its metrics."""
    run_nxd(folder, "train", *SETTINGS, f"output={output}", *settings)
    lines = (folder / output / "metrics.jsonl").read_text(encoding="utf8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def run_nxd(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder; raises a RuntimeError with what it printed if it fails."""
    command = [sys.executable, "-m", "nxd_cli", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nxd {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
    return done


def _fall(losses: list[float]) -> str:
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"
