"""`nxd run` with a layout: an unedited script trains at it, from the command line."""

import json
import os
import subprocess
import sys

import pytest
from nxd_testing import deadline

SCRIPT = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

folder, batch = sys.argv[1], int(sys.argv[2])
rows = [dict.fromkeys(["input_ids", "labels"], torch.arange(number, number + 12)) for number in range(16)]
arguments = TrainingArguments(
    f"{folder}/out", per_device_train_batch_size=batch, max_steps=3, logging_steps=1, learning_rate=0.1, optim="sgd",
    report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no",
)
trainer = Trainer(AutoModelForCausalLM.from_pretrained(f"{folder}/model"), arguments, train_dataset=rows)
trainer.train()
if trainer.is_world_process_zero():
    print("losses", json.dumps([log["loss"] for log in trainer.state.log_history if "loss" in log]))
"""


def losses_of(command, folder):
    done = subprocess.run(
        command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=deadline(240), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("losses ")]  # of one rank
    return json.loads(line.removeprefix("losses "))


@pytest.mark.sample(3)
def test_script_runs_unedited_at_a_layout(tmp_path, tools):
    tools.save_llama(tmp_path / "model")
    (tmp_path / "train.py").write_text(SCRIPT)
    expected = losses_of([sys.executable, "train.py", str(tmp_path), "4"], tmp_path)

    layout = ["--nproc", "4", "--tensor-parallel-size", "2", "--zero-stage", "1"]
    found = losses_of([sys.executable, "-m", "nxd_cli", "run", *layout, "train.py", str(tmp_path), "2"], tmp_path)

    assert found == pytest.approx(expected, rel=1e-6)
    assert expected[-1] < expected[0]


def test_layout_in_effect_is_one_line(tmp_path):
    (tmp_path / "train.py").write_text("print('done')")
    command = [sys.executable, "-m", "nxd_cli", "run", "--nproc", "4", "--tensor-parallel-size", "2", "train.py"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=deadline(240), check=False)

    assert [line for line in done.stderr.splitlines() if line.startswith("nxd: ")] == [
        "nxd: 4 ranks: tensor parallel 2, 2 replicas"
    ]


def test_degrees_that_do_not_fit_are_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "train.py").write_text("")
    command = [sys.executable, "-m", "nxd_cli", "run", "--nproc", "2", "--tensor-parallel-size", "3", "train.py"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=deadline(240), check=False)

    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("nxd run: --tensor-parallel-size 3: 2 ranks cannot be divided into replicas of 3; start a")
