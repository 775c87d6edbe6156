"""Times beside a peer in the same process: a training step, attention of a block, products with experts' weights.

A ratio is ours by the peer's: below one, ours is faster.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from nxd_layers.context.attention_kernels import Scores
from nxd_layers.context.block_attention import attend_block, attend_block_backward
from nxd_layers.experts.linear import grouped_product
from nxd_state.device import get_device, has_grouped_product
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gpu_check.llama import Size, ours, plain, size_for
from gpu_check.ranks import on_ranks
from gpu_check.rows import Row
from gpu_check.timing import in_turns, seconds_of

# Products of bfloat16 a second, dense, by the names of cards (NVIDIA's data sheets); of others no MFU is given.
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "A10": 125e12}


def rows(device: str) -> Iterator[Row]:
    """Rows of steps, each in a process of its own for its memory, then of kernels."""
    times: dict[str, float] = {}
    for name in ("ours", "ours, ZeRO-1", "plain PyTorch", "DDP", "FSDP2"):
        (times[name],) = on_ranks(device, step_seconds, 1, name, timeout=300.0)
        yield Row("speed", f"step of a Llama: {name}", "measured", _throughput(times[name], torch.device(device)))
    for name in ("plain PyTorch", "DDP", "FSDP2"):
        yield Row("speed", f"step: ours / {name}", "measured", f"{times['ours'] / times[name]:.3f}")
    yield Row("speed", "step: ours, ZeRO-1 / FSDP2", "measured", f"{times['ours, ZeRO-1'] / times['FSDP2']:.3f}")
    for case, ratios in on_ranks(device, kernel_ratios, 1, timeout=300.0)[0].items():
        yield Row("speed", case, "measured", ratios)


def _throughput(seconds: float, device: torch.device) -> str:
    size = size_for(device)
    text = f"{seconds * 1e3:.1f} ms, {size.batch * size.length / seconds:,.0f} tokens/s"
    card = torch.cuda.get_device_name() if device.type == "cuda" else ""
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in card), None)
    return text if peak is None else f"{text}, MFU {size.flops() / seconds / peak:.1%}"


def step_seconds(name: str) -> float:
    """Seconds of forward, backward and AdamW in bfloat16."""
    device = get_device()
    size = size_for(device)
    batch = size.tokens(device)
    if name.startswith("ours"):
        model, optimizer = ours(size, device, zero1="ZeRO-1" in name)
        return seconds_of(lambda: _step(lambda: model.run_train(**batch), optimizer), device)
    peer = _wrapped(name, plain(size, device), size, device)
    adam = torch.optim.AdamW(peer.parameters(), lr=1e-4, fused=True)
    return seconds_of(lambda: _step(lambda: _backward_of(peer, batch), adam), device)


def _backward_of(peer: nn.Module, batch: Mapping[str, Tensor]) -> None:
    peer(**batch).loss.backward()


def _step(backward: Callable[[], Any], optimizer: Any) -> None:
    backward()
    optimizer.step()
    optimizer.zero_grad()


def _wrapped(name: str, model: Any, size: Size, device: torch.device) -> nn.Module:
    if name == "DDP":
        return DistributedDataParallel(model)
    if name == "FSDP2":
        mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def kernel_ratios() -> dict[str, str]:
    """Times of a block of attention beside SDPA, and of grouped products beside torch's and beside a loop."""
    device = get_device()
    found = {"attention of a block / SDPA": _ratios(_attention(device), device)}
    if has_grouped_product(torch.bfloat16, device):
        found["products of 64 experts / F.grouped_mm"] = _ratios(_products(device), device)
    return found


def _ratios(runs: Mapping[str, Callable[[], object]], device: torch.device) -> str:
    times = in_turns(runs, device)
    mine = times.pop("ours")
    return ", ".join(f"{mine / it:.3f} of {name}" for name, it in times.items()) + f" ({mine * 1e3:.2f} ms)"


def _attention(device: torch.device) -> dict[str, Callable[[], object]]:
    length = 8192 if device.type == "cuda" else 512
    query, key, value = (
        torch.randn(1, heads, length, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (32, 8, 8)
    )
    grad = torch.randn_like(query)
    scores = Scores(128**-0.5)

    def mine() -> None:
        with torch.no_grad():
            output, log_sum = attend_block(query, key, value, scores, mask=None, causal=True)
            attend_block_backward(grad, query, key, value, output, log_sum, scores, mask=None, causal=True)

    def sdpa() -> None:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        torch.autograd.grad(output, (query, key, value), grad)

    return {"ours": mine, "SDPA forward and backward": sdpa}


def _products(device: torch.device) -> dict[str, Callable[[], object]]:
    rows, width, inner, experts = (65_536, 2048, 768, 64) if device.type == "cuda" else (512, 128, 64, 64)
    tokens = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    weights = torch.randn(experts, width, inner, device=device, dtype=torch.bfloat16)
    counts = torch.full((experts,), rows // experts, device=device)
    ends = counts.cumsum(dim=0, dtype=torch.int32)

    def loop() -> None:
        torch.cat([part @ weight for part, weight in zip(tokens.split(rows // experts), weights, strict=True)])

    return {
        "ours": lambda: grouped_product(tokens, weights, counts),
        "F.grouped_mm": lambda: F.grouped_mm(tokens, weights, offs=ends),
        "a loop": loop,
    }
