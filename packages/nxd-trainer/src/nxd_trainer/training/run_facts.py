"""What the log of a run says about an invocation: its environment, its data, and the memory and messages of a step.

All of it is measured or counted, once per invocation. Only `measured_step` communicates.
"""

import os
import platform
import socket
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import numpy as np
import nxd_state
import torch
from nxd_cli.launch import LAUNCHER_PID
from nxd_data import Conversations
from nxd_data.conversations import cut_lengths
from nxd_data.preferences import PairSequences
from nxd_optim import NeuronZero1Optimizer
from nxd_state import all_gather_object, count_traffic, get_device, get_world_group, is_cpu
from nxd_state.processes import Process
from torch import Tensor

from nxd_trainer.report import RunLog, peak_memory_bytes
from nxd_trainer.training.run_state import RunState

# Listed one by one, because others hold passwords and keys.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "LOCAL_WORLD_SIZE",
    "MKL_NUM_THREADS",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "NEURON_CC_FLAGS",
    "NEURON_RT_NUM_CORES",
    "NEURON_RT_VISIBLE_CORES",
    "NXD_CPU_MODE",
    "NXD_DEBUG_COLLECTIVES",
    "NXD_DEVICE",
    "NXD_LOG_LEVEL",
    "NXD_SHM",
    "NXD_TIMEOUT",
    "OMP_NUM_THREADS",
    "PJRT_DEVICE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "TORCH_LOGS",
    "XLA_FLAGS",
)
PACKAGES = ("torch", "transformers", "numpy", "safetensors", "torch-xla", "torch-neuronx", "neuronx-cc", "tensorboard")
MOST_COUNTED = 20_000  # samples, to determine the shares of padding and masked tokens
MEASURED_STEP = 2  # of an invocation: the first creates the optimizer states


@contextmanager
def logged_run(state: RunState) -> Iterator[RunLog]:
    """Keep the log of an invocation: its start, each rank's warnings since it was prepared, its end if it raises."""
    with RunLog(state.recipe.output, get_world_group().rank) as log:
        if state.is_writer:
            facts = {"process": _process(), "environment": _environment(state), "data": _data(state)}
            log.write("start", step=state.step, last_step=state.recipe.last_step, **facts)
        for warning in state.early_warnings:
            log.add_warning(*warning)
        try:
            yield log
        except BaseException as error:
            if state.is_writer:
                log.write("end", step=state.step, how="failed", error=f"{type(error).__name__}: {error}")
            raise


def _process() -> list[Any] | None:
    """Return this process, so that the report can find out whether it still runs; None without Linux's /proc."""
    try:
        return list(Process.of(os.getpid()))
    except OSError:
        return None


def _environment(state: RunState) -> dict[str, Any]:
    device, world = get_device(), get_world_group()
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads per rank": torch.get_num_threads(),
        "device": _device_name(device),
        "ranks": world.size,
        "layout": state.layout,
        "launcher": _launcher(),
        "working folder": os.getcwd(),
        "commit": _commit(),
        "python": platform.python_version(),
        **dict(sorted(_versions().items())),
        **{name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    return {name: value for name, value in facts.items() if value is not None}


def _device_name(device: torch.device) -> str:
    if is_cpu():
        return f"{device.type}, {platform.machine()}"
    try:
        return f"{torch.accelerator.device_count()} x {torch.get_device_module(device).get_device_name(device)}"
    except (RuntimeError, AttributeError):  # the accelerator's module has no names
        return device.type


def _launcher() -> str:
    if LAUNCHER_PID in os.environ:
        return "nxd --nproc"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    if "SLURM_PROCID" in os.environ:
        return "Slurm"
    return "RANK and WORLD_SIZE" if "RANK" in os.environ else "none"


def _commit() -> str | None:
    """Return the git commit of the working folder; None if it is not in a repository."""
    try:
        told = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip()


def _versions() -> dict[str, str]:
    found = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name is not None and (name in PACKAGES or name.startswith("nxd-")):
            found[name] = distribution.version
    return found


def _data(state: RunState) -> dict[str, Any]:
    recipe, data = state.recipe, state.data
    facts: dict[str, Any] = {
        "sources": [
            {
                "name": name,
                "kind": "conversations" if isinstance(source, Conversations) else "documents",
                "documents": source.index.num_conversations
                if isinstance(source, Conversations)
                else source.index.num_documents,
                "tokens": source.index.num_tokens,
            }
            for name, source in data.sources.items()
        ],
        "sequence_length": recipe.data.sequence_length,
        "global_batch_size": recipe.train.global_batch_size,
        "held_out_samples": len(data.held_out),
        "packed": "several conversations a sequence" if recipe.data.packing else None,
        "notes": [*data.notes, *data.warnings],
    }
    chats = [source for source in data.sources.values() if isinstance(source, Conversations)]
    if chats:
        kept = sum(int(cut_lengths(chat, recipe.data.sequence_length)[1].sum()) for chat in chats)
        facts["truncated"] = sum(chat.index.num_tokens for chat in chats) - kept
    if data.stream is not None:
        return facts | {"sources": [{"name": data.stream.name, "kind": "stream"}]}
    num_samples = len(data.train)
    counted = np.unique(np.linspace(0, num_samples - 1, min(num_samples, MOST_COUNTED)).astype(np.int64))
    learned, seen = data.train.count(counted)
    rows = len(counted) * (2 if isinstance(data.train, PairSequences) else 1)
    return facts | {
        "samples": num_samples,
        "rows_per_sample": rows // len(counted),
        "counted_samples": len(counted),
        "masked": 1 - learned / max(1, seen),
        "padding": 1 - seen / (rows * data.train.sequence_length),
    }


@contextmanager
def measured_step(log: RunLog, state: RunState, number: int) -> Iterator[None]:
    """Around a step, the `number`-th of this invocation: measure it if it is the one that is logged. On all ranks."""
    if number != MEASURED_STEP:
        yield
        return
    with count_traffic() as counts:
        yield
    sent = {axis: (it.calls, it.sent_bytes) for axis, it in counts.items()}
    ranks = all_gather_object((_memory(state), peak_memory_bytes(get_device()), sent), get_world_group())
    if state.is_writer:
        memories = [{**kinds, "peak": peak} for kinds, peak, _ in ranks]
        fullest = max(range(len(ranks)), key=lambda rank: memories[rank]["peak"])
        log.write(
            "memory",
            step=state.step,
            fullest_rank=fullest,
            bytes=memories[fullest],
            **{name: _by_name(memories, choose) for name, choose in (("least", min), ("most", max))},
            peak_is_of_process=nxd_state.peak_memory_bytes(get_device()) is None,
        )
        log.write("messages", step=state.step, axes=_busiest([sent for _, _, sent in ranks]))


def _memory(state: RunState) -> dict[str, int]:
    """Return the bytes of this rank's tensors by kind; gradients as they are at the end of backward."""
    optimizer = state.optimizer.optimizer
    trained = [it for it in state.model.parameters() if it.requires_grad]
    kinds = {
        "parameters": _bytes([*map(nxd_state.local_values, state.model.parameters()), *state.model.buffers()]),
        "gradients": _bytes(trained),
        "optimizer states": _bytes(value for values in state.optimizer.state.values() for value in values.values()),
    }
    if isinstance(optimizer, NeuronZero1Optimizer):
        report = optimizer.memory_report()
        kinds["gradients"] = report.predicted.gradients + report.measured.mean_gradients
        kinds["master weights"] = report.measured.master_weights
        kinds["optimizer states"] = report.measured.state
    if state.reference is not None:
        kinds["reference model"] = _bytes(state.reference.parameters())
    if state.average is not None:
        kinds["averaged weights"] = _bytes(shard.tensor for it in state.average.sharded_state() for shard in it.shards)
    return {kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes}


def _bytes(values: Iterable[Any]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _by_name(ranks: list[dict[str, int]], choose: Any) -> dict[str, int]:
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: choose(rank.get(name, 0) for rank in ranks) for name in names}


def _busiest(ranks: list[Mapping[str, tuple[int, int]]]) -> dict[str, dict[str, int]]:
    """Return for each axis the calls and bytes of the rank that sends most along it."""
    axes = dict.fromkeys(axis for rank in ranks for axis in rank)
    most = {axis: max((rank.get(axis, (0, 0)) for rank in ranks), key=lambda it: it[::-1]) for axis in axes}
    return {axis: {"calls": calls, "bytes": num_bytes} for axis, (calls, num_bytes) in most.items()}
