"""Run public training scripts unedited at layouts, and compare them with one plain process.

    python tools/trainer_scripts.py SCRIPTS WORK [--only sft.py ...]

SCRIPTS is a folder with scripts of transformers (run_clm.py) and TRL (sft.py, dpo.py, kto.py, reward.py). The small
model, its tokenizer and the data are made in WORK. Each script trains 20 steps of SGD in float32 on the CPU with the
same global batch; the largest relative difference of losses and norms, and of the saved weights, is printed as a row.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

LAYOUTS: dict[str, tuple[int, list[str]]] = {  # replicas, and options of `nxd run`
    "TP 2": (1, ["--nproc", "2", "--tensor-parallel-size", "2"]),
    "TP 2 x DP 2, ZeRO-1": (2, ["--nproc", "4", "--tensor-parallel-size", "2", "--zero-stage", "1"]),
    "DP 2, ZeRO-3": (2, ["--nproc", "2", "--zero-stage", "3"]),
}
COLUMNS = {
    "sft.py": ("prompt", "completion"),
    "dpo.py": ("prompt", "chosen", "rejected"),
    "kto.py": ("prompt", "completion", "label"),
    "reward.py": ("prompt", "chosen", "rejected"),
}
COMMON = {"max_steps": 20, "save_steps": 20, "logging_steps": 1, "learning_rate": 0.01, "optim": "sgd", "seed": 3}


def main() -> None:
    """Print a row for each script and layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", nargs="*", default=["run_clm.py", *COLUMNS])
    parsed = parser.parse_args()
    work = parsed.work.resolve()
    _save_models(work)
    for name in parsed.only:
        script = (parsed.scripts / name).resolve()
        expected = _run(script, work, "plain", 1, [sys.executable])
        for layout, (replicas, options) in LAYOUTS.items():
            found = _run(script, work, layout, replicas, [sys.executable, "-m", "nxd_cli", "run", *options])
            print(f"| `{name}` | {layout} | {_compared(found, expected)} |", flush=True)


def _save_models(work: Path) -> None:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(50))]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=32
    )
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        num_labels=1,
    )
    for folder, kind in (("model", LlamaForCausalLM), ("reward_model", LlamaForSequenceClassification)):
        torch.manual_seed(0)
        kind(config).save_pretrained(work / folder)
        tokenizer.save_pretrained(work / folder)


def _run(script: Path, work: Path, layout: str, replicas: int, launcher: list[str]) -> Path | str:
    """Run a script; returns the folder that it wrote, or the last line of its error."""
    output = work / f"{script.stem} {layout}".replace(" ", "_")
    options = {**COMMON, "per_device_train_batch_size": 4 // replicas, "output_dir": output, "report_to": "none"}
    options["model_name_or_path"] = work / ("reward_model" if script.name == "reward.py" else "model")
    data = work / f"data_{script.stem}"
    data.mkdir(exist_ok=True)
    if script.name in COLUMNS:
        _write_rows(data / "train.jsonl", COLUMNS[script.name])
        options |= {"dataset_name": data, "bf16": False}
    else:
        draw = random.Random(1)
        (data / "train.txt").write_text("\n".join(_words(draw, 20) for _ in range(200)))
        options |= {"train_file": data / "train.txt", "block_size": 16}
    command = [*launcher, str(script), "--use_cpu"]
    command += ["--do_train"] if script.name not in COLUMNS else []
    command += [text for key, value in options.items() for text in (f"--{key}", str(value))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    (work / f"{output.name}.log").write_text(done.stdout + done.stderr)
    return output if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def _words(draw: random.Random, count: int) -> str:
    return " ".join(f"w{draw.randrange(50)}" for _ in range(count))


def _write_rows(path: Path, columns: tuple[str, ...]) -> None:
    draw = random.Random(1)
    rows = [
        {name: row % 2 == 0 if name == "label" else f"{_words(draw, 3 + row % 4)} " for name in columns}
        for row in range(96)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))


def _compared(found: Path | str, expected: Path | str) -> str:
    if isinstance(expected, str) or isinstance(found, str):
        return f"stops: {expected if isinstance(expected, str) else found}"
    ours, theirs = (_numbers(folder) for folder in (found, expected))
    largest = max(abs(mine - its) / max(abs(its), 1e-6) for mine, its in zip(ours, theirs, strict=True))
    mine, its = (load_file(folder / "model.safetensors") for folder in (found, expected))
    weights = max(float((mine[name] - its[name]).abs().max()) for name in its)
    return f"{'same' if largest < 1e-5 else 'differs'}: losses and norms by {largest:.1e}, weights by {weights:.1e}"


def _numbers(folder: Path) -> list[float]:
    logs = json.loads((folder / "checkpoint-20/trainer_state.json").read_text())["log_history"]
    return [log[key] for log in logs for key in ("loss", "grad_norm") if key in log]


if __name__ == "__main__":
    main()
