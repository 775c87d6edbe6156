"""Times and weighs `stream_weights` for a Llama of 1.1 billion bfloat16 parameters on two ranks, beside FSDP2's ways.

    python tools/bench/stream_weights.py [--rounds 3] [--layers 16]

Takes about two minutes on two idle cores, needs 7 GB, and leaves nothing behind. Measured, with one thread per rank:

- ours at ZeRO-3 and at TP 2, to rank 0, in buckets of 512 MiB, plain and as fp8 blocks; whoever gets a tensor drops it;
- FSDP2's `get_model_state_dict(full_state_dict=True, cpu_offload=True)`, which holds the whole model on rank 0;
- FSDP2's parameters one by one (`full_tensor()`), each dropped, which all ranks get.

Ranks of ours communicate through shared memory, those of FSDP2 by gloo, as both do by default. The layouts are measured
one after the other, and all ways of a layout have their turn in each round, after one that does not count. Times and
memory are those of rank 0, medians over rounds; memory is the highest resident set above that of the process with its
part of the model.
"""

import argparse
import ctypes
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import nxd_engine
import torch
import torch.distributed as dist
from nxd_state import destroy_model_parallel, model_parallel_is_initialized
from processes.rank_processes import RankProcesses, in_turns
from processes.surroundings import print_surroundings
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

RANKS = 2


def build_ours(make: Callable[[], Any], **options: Any) -> nn.Module:
    return nxd_engine.initialize_parallel_model(nxd_engine.neuronx_distributed_config(**options), make)


def stream(model: nn.Module, **options: Any) -> int:
    return sum(tensor.nbytes for _, tensor in nxd_engine.stream_weights(model, **options))


def build_fsdp(make: Callable[[], Any]) -> nn.Module:
    model = make()
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole_state_dict(model: nn.Module) -> int:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    return sum(tensor.nbytes for tensor in state.values())


def each_full_tensor(model: nn.Module) -> int:
    parameters: list[Any] = list(model.parameters())  # DTensors
    return sum(parameter.full_tensor().nbytes for parameter in parameters)


PEER = "FSDP2, get_model_state_dict"
LAYOUTS: dict[str, Callable[[Callable[[], Any]], nn.Module]] = {
    "ZeRO-3": partial(build_ours, optimizer_config={"zero_stage": 3}),
    "TP 2": partial(build_ours, tensor_parallel_size=2),
    "FSDP2": build_fsdp,
}
# Of each way the layout, and what gets all whole tensors and returns their bytes.
WAYS: dict[str, tuple[str, Callable[[nn.Module], int]]] = {
    "ours, ZeRO-3": ("ZeRO-3", stream),
    "ours, TP 2": ("TP 2", stream),
    "ours, TP 2, fp8 blocks": ("TP 2", partial(stream, quantize="fp8_blocks")),
    PEER: ("FSDP2", whole_state_dict),
    "FSDP2, full_tensor of each": ("FSDP2", each_full_tensor),
}


@dataclass(frozen=True)
class Measurement:
    """Seconds, bytes of the tensors, and highest memory above the model's, of rank 0."""

    seconds: float
    size: int
    memory: int


def resident_bytes(field: str) -> int:
    """A field of this process's status: VmRSS (now), VmHWM (at most since the last reset)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def resident_after_trim() -> int:
    """Memory of this process, after what is free has gone back to the system; its highest counts from here."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def make_llama(layers: int) -> Any:
    """A Llama whose weights are all one number: times do not depend on them."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - in the ranks only

    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(vocab_size=32000, num_hidden_layers=layers, **sizes, architectures=["LlamaForCausalLM"])
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    return model


def _serve(layout: str, layers: int, rank: int, store: Path, connection: Connection) -> None:
    """Build a layout's model, and gather it in the ways that the parent says, until it hangs up."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model = LAYOUTS[layout](partial(make_llama, layers))
    baseline = resident_after_trim()
    while True:
        try:
            way = connection.recv()
        except EOFError:
            break
        resident_after_trim()
        dist.barrier()
        start = time.perf_counter()
        size = WAYS[way][1](model)
        connection.send(Measurement(time.perf_counter() - start, size, resident_bytes("VmHWM") - baseline))
    if model_parallel_is_initialized():
        destroy_model_parallel()
    dist.destroy_process_group()


def medians(measurements: list[Measurement]) -> tuple[float, float]:
    """Seconds and bytes of memory."""
    return median(it.seconds for it in measurements), median(it.memory for it in measurements)


def print_row(label: str, *cells: str) -> None:
    print(f"{label:32}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=16, help="layers of the model (default: %(default)s)")
    options = parser.parse_args()
    print_surroundings(options.rounds)
    found: dict[str, list[Measurement]] = {name: [] for name in WAYS}
    for layout in LAYOUTS:  # one after the other, since the memory of three models is rarely there
        with RankProcesses(RANKS, _serve, layout, options.layers) as ranks:
            ways = [name for name, (its_layout, _) in WAYS.items() if its_layout == layout]
            for turn, name in enumerate(in_turns(ways, 1 + options.rounds)):
                measured = ranks.request(name, f"at {name!r}")[0]
                if turn >= len(ways):
                    found[name].append(measured)
    peer_seconds, peer_memory = medians(found[PEER])
    print_row("on rank 0", "GB of tensors", "seconds", "/ FSDP2's", "GB of memory", "/ FSDP2's")
    for name, measurements in found.items():
        seconds, memory = medians(measurements)
        print_row(
            name,
            f"{measurements[0].size / 1e9:.2f}",
            f"{seconds:.2f}",
            f"{seconds / peer_seconds:.2f}",
            f"{memory / 1e9:.2f}",
            f"{memory / peer_memory:.2f}",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
