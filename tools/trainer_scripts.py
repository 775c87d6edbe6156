"""Run public training scripts unedited at layouts, and compare them with one plain process.

    python tools/trainer_scripts.py SCRIPTS WORK [--only NAME ...] [--layouts LAYOUT ...]
    python tools/trainer_scripts.py SCRIPTS WORK --table

SCRIPTS has the folders `transformers` (scripts below examples/pytorch), `trl` (trl/scripts) and `trl_examples`
(examples/scripts). Each script trains 20 steps of SGD in float32 on the CPU with a global batch of 4 rows: some 10
seconds for a run. Small models, tokenizers and data are made in WORK, where each run leaves its folder and its log;
plain runs that are there are used again. `results.json` keeps what was compared, and `--table` prints it as Markdown.
Scripts of transformers need `pip install evaluate`.

Importing the libraries takes 10 seconds in each process, so the ranks are forked from this one. Each then does what
`torchrun ... -m nxd_cli run LAYOUT SCRIPT` does.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nxd_cli
import torch
import transformers
from nxd_state import StoreServer
from peft import PeftModel
from trainer_scripts_data import write_data, write_models


@dataclass(frozen=True)
class Layout:
    """Ranks of a run.

    Attributes:
        ranks: number of processes.
        replicas: number of replicas, which share the global batch.
        options: options of `nxd run`; None for plain processes.
        resumes: the layout whose checkpoint of step 10 the run starts from; None starts at step 0.
    """

    ranks: int
    replicas: int
    options: str | None = None
    resumes: str | None = None


LAYOUTS = {
    "TP 2": Layout(2, 1, "--tensor-parallel-size 2"),
    "PP 2": Layout(2, 1, "--pipeline-parallel-size 2"),
    "TP 2 x DP 2, ZeRO-1": Layout(4, 2, "--tensor-parallel-size 2 --zero-stage 1"),
    "DP 2, ZeRO-3": Layout(2, 2, "--zero-stage 3"),
    "EP 2": Layout(2, 2, "--expert-parallel-size 2"),
    "resumed at ZeRO-3": Layout(2, 2, "--zero-stage 3", resumes="TP 2 x DP 2, ZeRO-1"),
    "resumed at EP 2": Layout(2, 2, "--expert-parallel-size 2", resumes="TP 2 x DP 2, ZeRO-1"),
    "resumed at PP 2": Layout(2, 1, "--pipeline-parallel-size 2", resumes="TP 2"),
}
MIXTURE = ("EP 2", "resumed at EP 2")  # layouts that only mixtures of experts have


_OF_TRAINER = (
    "--use_cpu --max_steps 20 --save_steps 10 --logging_steps 1 --learning_rate 0.1 --optim sgd --report_to none"
)
_OF_ACCELERATE = "--max_train_steps 20 --learning_rate 0.001"


@dataclass(frozen=True)
class Script:
    """A row of the table.

    Attributes:
        path: the script's path in SCRIPTS.
        model: the folder of its model in WORK.
        options: its options; `{data}` is the folder of data in WORK.
        common: the options that scripts of its kind have.
        draws: whether each process draws random numbers, or estimates, of its own, so that two plain processes are not
            one; several replicas are then compared with as many plain processes.
        redraws: whether a resumed run draws other numbers than one that was not stopped, plainly as well; resumed runs
            are then compared with a plain one that was resumed.
        resumes: whether it has an option that resumes a run.
    """

    path: str
    model: str
    options: str
    common: str = _OF_TRAINER
    draws: bool = False
    redraws: bool = False
    resumes: bool = True


_TEXT = "--train_file {data}/text.txt --block_size 16"
_TRL = "--bf16 False --dataset_name {data}/"
_TRAIN = "--do_train --train_file {data}/"
_OWN_LOSS = " --average_tokens_across_devices False"  # the model's loss does not count the tokens of all replicas
_LORA = " --use_peft --lora_r 4 --lora_alpha 8 --lora_dropout 0 --lora_target_modules q_proj o_proj up_proj"
_SAMPLES = " --reward_funcs rewards.evenness --num_generations 2 --max_completion_length 8 --temperature 1"
SCRIPTS = {
    "run_clm": Script("transformers/run_clm.py", "llama", f"--do_train {_TEXT}"),
    "run_clm, mixture": Script("transformers/run_clm.py", "mixture", f"--do_train {_TEXT}"),
    "run_glue_no_trainer": Script(
        "transformers/run_glue_no_trainer.py",
        "bert",
        "--train_file {data}/classes.json --validation_file {data}/classes.json --max_length 16",
        _OF_ACCELERATE,
        draws=True,
        resumes=False,
    ),
    "run_mlm": Script(
        "transformers/run_mlm.py", "bert", f"{_TRAIN}text.txt --max_seq_length 16", draws=True, redraws=True
    ),
    "run_classification": Script(
        "transformers/run_classification.py",
        "llama",
        f"{_TRAIN}classes.json --validation_file {{data}}/classes.json --text_column_names sentence" + _OWN_LOSS,
    ),
    "run_glue": Script(
        "transformers/run_glue.py",
        "bert",
        f"{_TRAIN}classes.json --validation_file {{data}}/classes.json --max_seq_length 16" + _OWN_LOSS,
    ),
    "run_ner": Script("transformers/run_ner.py", "llama", f"{_TRAIN}tags.json" + _OWN_LOSS, draws=True),
    "run_qa": Script(
        "transformers/run_qa.py", "llama", f"{_TRAIN}answers.json --max_seq_length 24 --doc_stride 8" + _OWN_LOSS
    ),
    "run_swag": Script("transformers/run_swag.py", "bert", f"{_TRAIN}endings.json" + _OWN_LOSS),
    "run_translation": Script(
        "transformers/run_translation.py",
        "t5",
        f"{_TRAIN}translations.json --source_lang en --target_lang de --max_source_length 16" + _OWN_LOSS,
    ),
    "sft": Script("trl/sft.py", "llama", f"{_TRL}completions"),
    "sft, LoRA": Script("trl/sft.py", "llama", f"{_TRL}completions" + _LORA),
    "sft, mixture": Script("trl/sft.py", "mixture", f"{_TRL}completions", draws=True),
    "dpo": Script("trl/dpo.py", "llama", f"{_TRL}preferences"),
    "dpo, LoRA": Script("trl/dpo.py", "llama", f"{_TRL}preferences" + _LORA),
    "kto": Script("trl/kto.py", "llama", f"{_TRL}labels", draws=True),
    "reward": Script("trl/reward.py", "reward", f"{_TRL}preferences"),
    "reward, LoRA": Script("trl/reward.py", "reward", f"{_TRL}preferences --lora_task_type SEQ_CLS" + _LORA),
    "grpo": Script("trl/grpo.py", "llama", f"{_TRL}prompts" + _SAMPLES, draws=True),
    "rloo": Script("trl/rloo.py", "llama", f"{_TRL}prompts" + _SAMPLES, draws=True),
    "reward_modeling": Script("trl_examples/reward_modeling.py", "reward", f"{_TRL}preferences", resumes=False),
    "cpo": Script("trl_examples/cpo.py", "llama", f"{_TRL}preferences", draws=True, resumes=False),
    "orpo": Script("trl_examples/orpo.py", "llama", f"{_TRL}preferences", draws=True, resumes=False),
    "tpo": Script("trl_examples/tpo.py", "llama", f"{_TRL}triples", draws=True, resumes=False),
}
_LOGITS = ("logits", "start_logits", "end_logits")
_SECONDS = 300  # for a run
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
_PRELOADED = ("datasets", "nxd_hf_trainer", "transformers.models.llama.modeling_llama", "torch._dynamo")


def main() -> None:
    """Run what is asked for, and print a row for each script and layout; or print the table of all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", nargs="*", default=list(SCRIPTS), help=", ".join(SCRIPTS))
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), help="; ".join(LAYOUTS))
    parser.add_argument("--table", action="store_true")
    parsed = parser.parse_args()
    runner = Runner(parsed.scripts.resolve(), parsed.work.resolve())
    if parsed.table:
        print(_table(runner.results()))
        return
    for module in _PRELOADED:
        importlib.import_module(module)
    for trainer in ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer"):
        getattr(importlib.import_module("trl"), trainer)
    if not (runner.work / "data").exists():
        write_models(runner.work)
        write_data(runner.work)
    for name in parsed.only:
        for layout in parsed.layouts:
            script, at = SCRIPTS[name], LAYOUTS[layout]
            if (layout not in MIXTURE or script.model == "mixture") and (script.resumes or at.resumes is None):
                print(f"{name} | {layout} | {runner.compare(name, layout)}", flush=True)


class Runner:
    """Runs scripts in a folder, and keeps what was compared.

    Args:
        scripts: the folder of the scripts.
        work: the folder of models, data and outputs.
    """

    def __init__(self, scripts: Path, work: Path) -> None:
        self.scripts = scripts
        self.work = work
        self._file = work / "results.json"

    def results(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return what has been compared, by script and layout."""
        found: dict[str, dict[str, dict[str, Any]]] = json.loads(self._file.read_text()) if self._file.exists() else {}
        return found

    def compare(self, name: str, layout: str) -> dict[str, Any]:
        """Run a script at a layout, and plainly if it has not been run so yet.

        Returns:
            the largest relative differences of `losses` (with gradient norms) and of the saved model's `logits`; or
            the `error` that stopped the script.
        """
        script = SCRIPTS[name]
        at = LAYOUTS[layout]
        replicas = at.replicas if script.draws else 1
        result: dict[str, Any]
        try:
            expected = self._run(name, f"plain {replicas}", Layout(replicas, replicas))
            if script.redraws and at.resumes is not None:
                resumed = Layout(replicas, replicas, resumes=f"plain {replicas}")
                expected = self._run(name, f"plain {replicas} resumed", resumed)
            found = self._run(name, layout, at)
            base = self.work / script.model
            result = {"losses": _losses_differ(found, expected), "logits": _logits_differ(found, expected, base)}
        except RuntimeError as error:
            result = {"error": str(error)}
        results = self.results()
        results.setdefault(name, {})[layout] = result
        self._file.write_text(json.dumps(results, indent=1))
        return result

    def _run(self, name: str, label: str, layout: Layout) -> Path:
        """Run a script; return the folder that it wrote."""
        script = SCRIPTS[name]
        output = self._output(name, label)
        if layout.options is None and output.exists():
            return output
        shutil.rmtree(output, ignore_errors=True)
        output.parent.mkdir(exist_ok=True)
        options = f"{script.common} {script.options} --seed 3 --model_name_or_path {script.model} --output_dir {output}"
        options += f" --per_device_train_batch_size {4 // layout.replicas}"
        start = output / "checkpoint-10/trainer_state.json"
        if layout.resumes is not None:
            before = self._output(name, layout.resumes) / "checkpoint-10"
            if not before.exists():
                raise RuntimeError(f"there is no {before.relative_to(self.work)} to resume")
            shutil.copytree(before, start.parent)
            options += f" --resume_from_checkpoint {start.parent}"
        written = start.stat().st_mtime if start.exists() else None
        command = [str(self.scripts / script.path), *shlex.split(options.format(data=self.work / "data"))]
        if layout.options is not None:
            command = ["run", *layout.options.split(), *command]
        log = output.with_suffix(".log")
        if not _finishes(command, layout.ranks, self.work, log):
            shutil.rmtree(output, ignore_errors=True)  # else it would be taken for a complete one
            raise RuntimeError(_first_error(log.read_text()))
        if written is not None and start.stat().st_mtime != written:
            raise RuntimeError("the script ignores --resume_from_checkpoint")
        return output

    def _output(self, name: str, label: str) -> Path:
        return self.work / "runs" / re.sub(r"\W+", "_", f"{name} {label}")


def _finishes(command: Sequence[str], num_ranks: int, folder: Path, log: Path) -> bool:
    """Run a command of `nxd`, or a script, on ranks that are forked from this process; returns whether it succeeds."""
    forked = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0), backlog=2 * num_ranks) as listener:
        of_all = {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is served here
            "GLOO_SOCKET_IFNAME": "lo",
        }
        log.unlink(missing_ok=True)
        is_plain = command[0] != "run"
        if (
            is_plain
        ):  # without it, Accelerate takes ranks on the CPU for processes that have nothing to do with each other
            of_all["ACCELERATE_USE_CPU"] = "true"
        ranks = []
        for number in range(num_ranks):
            environment = (
                {} if is_plain and num_ranks == 1 else {**of_all, "RANK": str(number), "LOCAL_RANK": str(number)}
            )
            ranks.append(forked.Process(target=_rank, args=(command, environment, folder, log)))
            ranks[-1].start()
        with StoreServer(listener):
            for rank in ranks:
                rank.join(_SECONDS)
                if rank.exitcode != 0:
                    break
            for rank in ranks:
                rank.join(0 if rank.exitcode == 0 else 10)
                rank.kill()
                rank.join()
    return all(rank.exitcode == 0 for rank in ranks)


def _rank(command: Sequence[str], environment: dict[str, str], folder: Path, log: Path) -> None:
    """Run a command in this process, with its output in a file."""
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    os.chdir(folder)
    try:
        if command[0] == "run":
            sys.exit(nxd_cli.main(command))
        sys.argv = list(command)
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def _first_error(log: str) -> str:
    found = re.search(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception): .*)$", log, re.MULTILINE)
    return found[1] if found else (log.strip().splitlines() or ["no message"])[-1]


def _losses_differ(found: Path, expected: Path) -> float:
    """Return the largest difference of losses and norms of gradients, relative to the number, or 0.1 if it is less."""
    ours, theirs = (_numbers(folder) for folder in (found, expected))
    return max(abs(mine - its) / max(abs(its), 0.1) for mine, its in zip(ours, theirs, strict=True))


def _numbers(folder: Path) -> list[float]:
    """Return the losses and norms of all steps, or the results of a script without a Trainer."""
    states = folder / "checkpoint-20/trainer_state.json"
    if not states.exists():
        results: dict[str, float] = json.loads((folder / "all_results.json").read_text())
        return list(results.values())
    history: list[dict[str, float]] = json.loads(states.read_text())["log_history"]
    return [log[key] for log in history for key in ("loss", "grad_norm") if key in log]


def _logits_differ(found: Path, expected: Path, base: Path) -> float:
    """Return the largest difference of the saved models' logits, relative to the largest logit."""
    ours, theirs = (_logits(folder, base) for folder in (found, expected))
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _logits(folder: Path, base: Path) -> torch.Tensor:
    is_adapter = (folder / "adapter_config.json").exists()
    whole = base if is_adapter else folder
    architecture = json.loads((whole / "config.json").read_text())["architectures"][0]
    model: Any = getattr(transformers, architecture).from_pretrained(whole)
    if is_adapter:
        model = PeftModel.from_pretrained(model, folder)
    ids = torch.arange(5, 37).view(2, 16)
    inputs = {"input_ids": ids.unsqueeze(0) if architecture.endswith("MultipleChoice") else ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    with torch.no_grad():
        output = model.eval()(**inputs)
    return torch.cat([value.flatten() for name, value in output.items() if name in _LOGITS])


def _table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return Markdown: a row for each script, then the errors."""
    rows = [f"| script | {' | '.join(LAYOUTS)} | logits |", "|" + " --- |" * (len(LAYOUTS) + 2)]
    errors: dict[tuple[str, str], list[str]] = {}  # layouts, by script and error
    for name in SCRIPTS:
        of_layouts, cells = results.get(name, {}), []
        for layout in LAYOUTS:
            result = of_layouts.get(layout, {})
            if "error" in result:
                errors.setdefault((name, result["error"]), []).append(layout)
            cells.append("stops" if "error" in result else f"{result['losses']:.1e}" if result else "")
        logits = max((it["logits"] for it in of_layouts.values() if "logits" in it), default=None)
        rows.append(f"| {name} | {' | '.join(cells)} | {'' if logits is None else f'{logits:.1e}'} |")
    stopped = [f"| {name} | {', '.join(layouts)} | {error} |" for (name, error), layouts in errors.items()]
    return "\n".join([*rows, "", "| script | layouts | error |", "| --- | --- | --- |", *stopped])


if __name__ == "__main__":
    if not os.environ.keys() >= _OFFLINE.keys():  # the libraries read them when they are imported
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_OFFLINE})
    main()
