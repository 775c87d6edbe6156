"""Damages files of every format that the packages read, and bodies of requests, and reads them.

    python tools/fuzz.py [--minutes 60] [--seed 0] [--only NAME]

Each case takes a good file or folder, changes it by its own seed (bits, bytes, lengths, values of JSON) and reads it in
a child process. A reader returns what the file still holds or raises the one error that it documents. Anything else
(another exception, a signal, more than a minute, more than ten times the file's size and 64 MiB of memory, a file left
in the working directory) is printed with the seed that repeats it, and the exit code is 1.
"""

import argparse
import collections
import copy
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import nxd_ckpt
import nxd_trace
import torch
from nxd_ckpt.interop import (
    TensorSource,
    from_checkpoint,
    open_deepspeed,
    open_fsdp,
    open_hugging_face,
    open_neuronx,
    open_torch_dcp,
    read_whole,
    write_hugging_face,
    write_neuronx,
    write_torch_dcp,
)
from nxd_ckpt.interop.neuronx import Split
from nxd_data.sources import find_text_files, scan_text_files
from nxd_data.tokenizer import load_tokenizer
from nxd_engine.hugging_face import model_on_meta, read_config
from nxd_lora import read_peft_config
from nxd_trace.manifest import ModelManifest
from nxd_trainer.recipe import RecipeError, load_recipe
from torch.distributed import checkpoint as dcp

TENSORS = {"a.weight": torch.arange(48.0).reshape(8, 6), "b.weight": torch.arange(15.0).reshape(5, 3)}
MEMORY = 64 << 20  # bytes, for modules that are loaded late
CASES_OF_A_CHILD = 25
SECONDS_OF_A_CASE = 60
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**63,
    10**30,
    1e308,
    float("nan"),
    "",
    "..",
    "/",
    "\n\0",
    "os:system",
    [],
    [[]],
    {},
    {"": []},
)


class Reader(NamedTuple):
    """One format: how a good one is made in a folder, and how it is read."""

    make: Callable[[Path], object]
    read: Callable[[Path], object]
    errors: tuple[type[Exception], ...]


def make_neuronx(folder: Path, layout: Literal["v1", "v2"], *, xser: bool) -> None:
    write_neuronx(
        _source(folder),
        folder,
        None if layout == "v1" else "t",
        sharding={"a.weight": Split(dim=0)},
        tensor_parallel_size=2,
        layout=layout,
        xser=xser,
    )


def make_fsdp(folder: Path, *, flat_states: bool) -> None:
    """As torch's `get_state_dict` names weights and states: below two keys, or flat as torchtitan does."""
    states = {name: {"exp_avg": tensor, "step": torch.tensor(3.0)} for name, tensor in TENSORS.items()}
    flat = {f"state.{name}.{key}": value for name, state in states.items() for key, value in state.items()}
    saved = {**TENSORS, "optimizer": flat} if flat_states else {"model": TENSORS, "optim": {"state": states}}
    dcp.save({**saved, "step": 3}, checkpoint_id=folder / "fsdp", no_dist=True)


def make_fsdp_whole(folder: Path) -> None:
    torch.save(TENSORS, folder / "pytorch_model_fsdp.bin")
    torch.save({"state": {name: {"exp_avg": tensor} for name, tensor in TENSORS.items()}}, folder / "optimizer.bin")


def make_universal(folder: Path, *, stage: int) -> None:
    """DeepSpeed's universal form: of stage 3 flat and without `step.pt`."""
    for name, tensor in TENSORS.items():
        (folder / "zero" / name).mkdir(parents=True)
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            content = tensor.flatten() if stage == 3 else {"cat_dim": 0, "param": tensor}
            torch.save(content, folder / "zero" / name / f"{key}.pt")
        if stage < 3:
            torch.save(torch.tensor(4.0), folder / "zero" / name / "step.pt")
    states = {
        "module": {"running": torch.ones(2), "frozen": torch.ones(2)},
        "buffer_names": ["running"],
        "param_shapes": [{name: tensor.shape for name, tensor in TENSORS.items()}],
        "frozen_param_shapes": {"frozen": torch.Size([2])},
        "global_steps": 5,
        "skipped_steps": 1,
    }
    torch.save(states, folder / ("zero_pp_rank_0_" * (stage == 3) + "mp_rank_00_model_states.pt"))


def make_weights_of_deepspeed(folder: Path) -> None:
    files = {name: f"pytorch_model-0000{number}-of-00002.bin" for number, name in enumerate(TENSORS, 1)}
    for name, file in files.items():
        torch.save({name: TENSORS[name]}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))


def read_all(source: TensorSource) -> None:
    for name in source.tensors:
        read_whole(source, name)


def small_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())


def read_own(folder: Path) -> None:
    """Also notices elements that are not those saved."""
    found = nxd_ckpt.open_checkpoint(folder, "t")
    if not all(torch.equal(found.read(name), tensor) for name, tensor in TENSORS.items()):
        raise AssertionError("read, and not what was saved")


def make_traced(folder: Path) -> None:
    with nxd_trace.parallel_model_trace(
        small_model,
        torch.ones(2, 4),
        tp_degree=1,
        compiler="export",
        inline_weights_to_neff=False,
        progress=False,
    ) as model:
        nxd_trace.parallel_model_save(model, folder / "model")


def read_traced(folder: Path) -> None:
    """With hashes that fit the files, as whoever forges one writes them."""
    manifest = folder / "model" / "manifest.json"
    try:
        content = json.loads(manifest.read_text())
        for name, entry in content["files"].items():
            data = (folder / "model" / name).read_bytes()
            content["files"][name] = {**entry, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest.write_text(json.dumps(content))
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError):
        pass  # the damage is in the manifest
    ModelManifest.read(folder / "model").check(folder / "model")


def make_tokenizer(folder: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1, "b": 2}, "unk_token": "</s>"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


def make_config(folder: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32, **sizes}
    (folder / "config.json").write_text(json.dumps(whole))


def make_adapter(folder: Path) -> None:
    content = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(content))


def make_recipe(folder: Path) -> None:
    settings = {"train": {"steps": 3, "global_batch_size": 2}, "parallel": {"tensor_parallel_size": 2}}
    text = "\n".join(
        f"[{name}]\n" + "\n".join(f"{key} = {value}" for key, value in section.items())
        for name, section in settings.items()
    )
    (folder / "recipe.toml").write_text(text)
    (folder / "recipe.json").write_text(json.dumps(settings))
    (folder / "recipe.yaml").write_text(json.dumps(settings, indent=1))


def read_recipes(folder: Path) -> None:
    """All three; the first that is damaged is the one that raises."""
    for suffix in ("toml", "json", "yaml"):
        load_recipe(folder / f"recipe.{suffix}")


READERS = {
    "nxd": Reader(
        lambda folder: nxd_ckpt.save(folder, "t", TENSORS, objects={"lr": 0.1}),
        read_own,
        (nxd_ckpt.CheckpointError,),
    ),
    "hugging-face": Reader(
        lambda folder: write_hugging_face(_source(folder), folder, max_shard_size=200),
        lambda folder: read_all(open_hugging_face(folder)),
        (nxd_ckpt.CheckpointError,),
    ),
    "dcp": Reader(
        lambda folder: write_torch_dcp(_source(folder), folder / "dcp"),
        lambda folder: read_all(open_torch_dcp(folder / "dcp")),
        (nxd_ckpt.CheckpointError,),
    ),
    "fsdp": Reader(
        lambda folder: make_fsdp(folder, flat_states=False),
        lambda folder: read_all(open_fsdp(folder / "fsdp")),
        (nxd_ckpt.CheckpointError,),
    ),
    "torchtitan": Reader(
        lambda folder: make_fsdp(folder, flat_states=True),
        lambda folder: read_all(open_fsdp(folder / "fsdp")),
        (nxd_ckpt.CheckpointError,),
    ),
    "fsdp-whole": Reader(
        make_fsdp_whole,
        lambda folder: read_all(open_fsdp(folder)),
        (nxd_ckpt.CheckpointError,),
    ),
    "zero-2": Reader(
        lambda folder: make_universal(folder, stage=2),
        lambda folder: read_all(open_deepspeed(folder)),
        (nxd_ckpt.CheckpointError,),
    ),
    "zero-3": Reader(
        lambda folder: make_universal(folder, stage=3),
        lambda folder: read_all(open_deepspeed(folder)),
        (nxd_ckpt.CheckpointError,),
    ),
    "zero-weights": Reader(
        make_weights_of_deepspeed,
        lambda folder: read_all(open_deepspeed(folder)),
        (nxd_ckpt.CheckpointError,),
    ),
    "neuronx-v1": Reader(
        lambda folder: make_neuronx(folder, "v1", xser=False),
        lambda folder: read_all(open_neuronx(folder, None, sharding={"a.weight": Split(dim=0)})),
        (nxd_ckpt.CheckpointError,),
    ),
    "neuronx": Reader(
        lambda folder: make_neuronx(folder, "v2", xser=False),
        lambda folder: read_all(open_neuronx(folder, "t", sharding={"a.weight": Split(dim=0)})),
        (nxd_ckpt.CheckpointError,),
    ),
    "neuronx-xser": Reader(
        lambda folder: make_neuronx(folder, "v2", xser=True),
        lambda folder: read_all(open_neuronx(folder, "t", sharding={"a.weight": Split(dim=0)})),
        (nxd_ckpt.CheckpointError,),
    ),
    "traced-model": Reader(make_traced, read_traced, (nxd_trace.ModelFolderError,)),
    "recipe": Reader(make_recipe, read_recipes, (RecipeError,)),
    "tokenizer": Reader(make_tokenizer, load_tokenizer, (ValueError,)),
    "config": Reader(make_config, lambda folder: model_on_meta(read_config(folder)), (ValueError,)),
    "adapter": Reader(make_adapter, read_peft_config, (ValueError,)),
    "texts": Reader(
        lambda folder: [(folder / f"{n}.txt").write_text("a text\n" * 50) for n in range(3)],
        lambda folder: scan_text_files(find_text_files(folder)),
        (ValueError,),
    ),
}


def _source(folder: Path) -> TensorSource:
    root = folder.parent / f"source of {folder.name}"
    nxd_ckpt.save(root, "t", TENSORS)
    return from_checkpoint(nxd_ckpt.open_checkpoint(root, "t"))


def damage(file: Path, chance: random.Random) -> None:
    """Change values of a file of JSON, or bytes of any file."""
    if file.suffix == ".json" and chance.random() < 0.6:
        tree = json.loads(file.read_text())
        for _ in range(chance.randint(1, 3)):
            places = places_in(tree)
            if not places:
                break
            (holder, key), (other, of) = chance.choice(places), chance.choice(places)
            holder[key] = copy.deepcopy(chance.choice([*ODD, other[of], other[of]]))
        file.write_text(json.dumps(tree))
        return
    file.write_bytes(change_bytes(file.read_bytes(), chance))


def change_bytes(content: bytes, chance: random.Random) -> bytes:
    """Other bytes in a few places; some are left out or put in."""
    changed = bytearray(content)
    for _ in range(chance.randint(1, 8)):
        start, size = chance.randrange(len(changed) + 1), chance.choice([0, 1, 1, 2, 8, 64])
        new = chance.choice([chance.randbytes(size), b"[" * size, b"9" * size, bytes(size), b"\xff" * size])
        changed[start : start + chance.choice([0, size])] = new
        if changed and chance.random() < 0.3:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        if chance.random() < 0.05:
            del changed[start:]
    return bytes(changed)


def places_in(tree: Any) -> list[tuple[Any, Any]]:
    """Each value of a tree of JSON, as what holds it and the key or index."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in items for place in [(tree, key), *places_in(value)]]


def peak_memory() -> int:
    """In bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run_case(name: str, good: Path, folder: Path, seed: int) -> str:
    """In the child: "whole", "refused", or what is wrong."""
    chance, reader = random.Random(f"{name} {seed}"), READERS[name]
    shutil.copytree(good, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    damage(chance.choice(files), chance)
    size, before = sum(path.stat().st_size for path in files), peak_memory()
    signal.alarm(SECONDS_OF_A_CASE)
    try:
        reader.read(folder)
        outcome = "whole"
    except reader.errors as error:
        outcome = "refused" if len(str(error)) < 3000 else f"a message of {len(str(error))} characters: {error}"
    except BaseException:
        outcome = traceback.format_exc()
    signal.alarm(0)
    if peak_memory() - before > MEMORY + 10 * size:
        outcome = f"took {peak_memory() - before} bytes for {size}"
    if left := os.listdir("."):
        outcome = f"left {left} in the working directory"
    shutil.rmtree(folder)
    return outcome


def run_child(name: str, good: Path, scratch: Path, seeds: range) -> list[str]:
    """Outcomes of these seeds; a signal that ends the child is the outcome of the seed after the last that it told."""
    receiver, sender = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(receiver)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        with os.fdopen(sender, "w") as pipe:
            for seed in seeds:
                print(json.dumps(run_case(name, good, scratch / "case", seed)), file=pipe, flush=True)
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as pipe:
        outcomes = [json.loads(line) for line in pipe if line.endswith("\n")]
    status = os.waitpid(pid, 0)[1]
    shutil.rmtree(scratch / "case", ignore_errors=True)
    return [*outcomes, f"child ended with status {status}"] if status else outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=READERS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
        (scratch / "here").mkdir()
        os.chdir(scratch / "here")
        names = [options.only] if options.only else list(READERS)
        for name in names:
            (scratch / "good" / name).mkdir(parents=True)
            READERS[name].make(scratch / "good" / name)
            READERS[name].read(scratch / "good" / name)
        seed, end = options.seed, time.monotonic() + 60 * options.minutes
        while time.monotonic() < end:
            for name in names:
                seeds = range(seed, seed + CASES_OF_A_CHILD)
                for case, outcome in zip(seeds, run_child(name, scratch / "good" / name, scratch, seeds), strict=False):
                    counts[name][outcome if outcome in ("whole", "refused") else "wrong"] += 1
                    if outcome not in ("whole", "refused"):
                        print(f"{name}, --seed {case}: {outcome}", flush=True)
            seed += CASES_OF_A_CHILD
        os.chdir("/")
    for name, count in counts.items():
        print(f"{name:14}" + "".join(f" {what} {count[what]:6}" for what in ("whole", "refused", "wrong")))
    return 1 if any(count["wrong"] for count in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
