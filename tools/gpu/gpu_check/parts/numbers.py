"""Two optimizer steps of small Hugging Face models at each layout and dtype, and plain PyTorch's on the CPU.

AdamW with an epsilon of 1 is nearly linear in the gradients, so the change of the weights shows how exact these are:
its error is measured in the norm of all weights together. In bfloat16 the measure is what plain PyTorch's rounding
does on the CPU. Initial adapters depend on the dtype, so those are compared in float64 only.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from hf_survey.architectures import LENGTH, tiny_batch, tiny_model
from nxd_engine import initialize_parallel_model, initialize_parallel_optimizer, neuronx_distributed_config
from nxd_engine.checkpoints.state import logical_name
from nxd_lora import LoraConfig
from nxd_parity import InFloat64
from nxd_state import get_group, whole_parameters
from nxd_state.device import get_device
from nxd_testing import LogicalPiece, RankFailure, assemble_logical, logical_pieces
from torch import Tensor, nn

from gpu_check.ranks import on_ranks
from gpu_check.rows import Row, check

STEPS = 2
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4}
ROUNDING = 1.5  # times the error of plain PyTorch in the same dtype
OPTIMIZER: dict[str, Any] = {"lr": 0.5, "eps": 1.0, "weight_decay": 0.0}
ADAPTERS = LoraConfig(lora_rank=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")


@dataclass(frozen=True)
class Layout:
    """How a model is split over how many ranks, and whether adapters train instead of it."""

    name: str
    num_ranks: int
    config: dict[str, Any]
    lora: bool = False


PIPELINE = {"num_microbatches": 2, "auto_partition": True, "input_names": ["input_ids", "labels"]}


def _zero(stage: int, offload: str | None = None) -> dict[str, Any]:
    clipping = {"grad_clipping": True, "max_grad_norm": 1.0}
    return {"optimizer_config": {"zero_stage": stage, "zero_offload": offload, **clipping}}


TP, PP, CP, EP = (f"{axis}_parallel_size" for axis in ("tensor", "pipeline", "context", "expert"))
LAYOUTS = [
    Layout("1 rank", 1, {}),
    Layout("TP 2", 2, {TP: 2}),
    Layout("TP 2 + SP", 2, {TP: 2, "sequence_parallel": True}),
    Layout("CP 2", 2, {CP: 2}),
    Layout("PP 2", 2, {PP: 2, "pipeline_config": PIPELINE}),
    Layout("DP 2 + ZeRO-1", 2, _zero(1)),
    Layout("DP 2 + ZeRO-1, states on the host", 2, _zero(1, "optimizer")),
    Layout("DP 2 + ZeRO-3", 2, _zero(3)),
    Layout("DP 2 + ZeRO-3 on the host", 2, _zero(3, "parameters")),
    Layout("TP 2 + LoRA", 2, {TP: 2}, lora=True),
    Layout("TP 2 x PP 2", 4, {TP: 2, PP: 2, "pipeline_config": PIPELINE}),
    Layout("TP 2 x DP 2 + ZeRO-1", 4, {TP: 2, **_zero(1)}),
]
WITH_EXPERTS = [
    Layout("1 rank", 1, {}),
    Layout("EP 2", 2, {EP: 2}),
    Layout("EP 2 x TP 2", 4, {EP: 2, TP: 2}),
]
ONE_RANK = LAYOUTS[:1]
MODELS = {"llama": LAYOUTS, "qwen3_moe": WITH_EXPERTS} | dict.fromkeys(["gemma2", "gpt_oss", "qwen3_next"], ONE_RANK)


def rows(device: str, models: dict[str, list[Layout]] = MODELS) -> Iterator[Row]:
    """One row for each model, layout and dtype."""
    for model_type, layouts in models.items():
        expected = in_one_process(model_type, torch.float64)
        bounds = BOUNDS | {torch.bfloat16: ROUNDING * error_of([in_one_process(model_type, torch.bfloat16)], expected)}
        for layout in layouts:
            if layout.lora:
                reference = on_ranks("cpu", in_layout, 1, model_type, replace(layout, config={}), torch.float64)
                yield _compare(device, model_type, layout, torch.float64, bounds[torch.float64], reference[0])
            else:
                for dtype in DTYPES:
                    yield _compare(device, model_type, layout, dtype, bounds[dtype], expected)


@dataclass(frozen=True)
class Trained:
    """The loss of each step, where this rank has it, and its pieces of the weights' change."""

    losses: list[Tensor]
    change: list[LogicalPiece]


def in_one_process(model_type: str, dtype: torch.dtype) -> Trained:
    """The reference: plain PyTorch on the CPU."""
    with InFloat64() if dtype == torch.float64 else nullcontext():
        model = model_of(model_type, dtype)
        before = {name: it.detach().clone() for name, it in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
        losses = []
        for _ in range(STEPS):
            loss = model(**batch_of(model_type)).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        change = logical_pieces((name, it, (it - before[name]).double()) for name, it in model.named_parameters())
    return Trained(losses, change)


def batch_of(model_type: str) -> dict[str, Tensor]:
    """Tokens and labels, of a length that two ranks can share."""
    return {name: it[:, : LENGTH // 2 * 2] for name, it in tiny_batch(model_type).items()}


def model_of(model_type: str, dtype: torch.dtype) -> nn.Module:
    """The same weights in any dtype; buffers, such as rotary frequencies, in float32 at least, as transformers does."""
    with InFloat64():
        model = tiny_model(model_type)
    for parameter in model.parameters():
        parameter.data = parameter.to(dtype)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.to(dtype if dtype == torch.float64 else torch.float32)
    return model


def in_layout(model_type: str, layout: Layout, dtype: torch.dtype) -> Trained:
    """The same steps by this rank of a layout, on this process's device."""
    adapters = ADAPTERS if layout.lora else None
    config = neuronx_distributed_config(**layout.config, lora_config=adapters)
    with InFloat64() if dtype == torch.float64 else nullcontext():
        model = initialize_parallel_model(config, lambda: model_of(model_type, dtype))
        trained = {name: it for name, it in model.pipeline.local_named_parameters() if it.requires_grad}
        with whole_parameters(trained.values()):
            before = {name: it.detach().clone() for name, it in trained.items()}
        optimizer = initialize_parallel_optimizer(config, torch.optim.AdamW, trained.values(), **OPTIMIZER)
        replicas = get_group("dp")
        batch = {name: it.chunk(replicas.size)[replicas.rank] for name, it in batch_of(model_type).items()}
        losses = []
        for _ in range(STEPS):
            loss = model.run_train(**{name: it.to(get_device()) for name, it in batch.items()})
            optimizer.step()
            optimizer.zero_grad()
            if isinstance(loss, Tensor):
                losses.append(loss.detach())
        with whole_parameters(trained.values()):
            named = [(name, it, (it - before[name]).double()) for name, it in trained.items()]
    pieces = [replace(it, name=logical_name(*it.name.partition(":")[::2])) for it in logical_pieces(named)]
    return Trained(losses, pieces)


def error_of(ranks: Sequence[Trained], expected: Trained) -> float:
    """The largest relative error of a loss, or that of the weights' change if it is larger.

    Raises:
        AssertionError: ranks disagree, or a parameter is on one side only.
    """
    losses = torch.stack([torch.stack(rank.losses).double() for rank in ranks if rank.losses]).mean(0)
    wanted_losses = torch.stack(expected.losses).double()
    wanted = assemble_logical([expected.change])
    found = assemble_logical([rank.change for rank in ranks], rtol=1e-2)
    assert found.keys() == wanted.keys(), f"of one side only: {', '.join(sorted(found.keys() ^ wanted.keys()))}"
    difference = sum(float((found[name] - it).square().sum()) for name, it in wanted.items())
    size = sum(float(it.square().sum()) for it in wanted.values())
    return max(float(((losses - wanted_losses) / wanted_losses).abs().max()), (difference / size) ** 0.5)


def _compare(device: str, model_type: str, layout: Layout, dtype: torch.dtype, bound: float, expected: Trained) -> Row:
    case = f"{model_type} {layout.name} {str(dtype).removeprefix('torch.')}"
    try:
        error = error_of(on_ranks(device, in_layout, layout.num_ranks, model_type, layout, dtype), expected)
    except RankFailure as failure:
        return Row("numbers", case, "failed", next(iter(failure.failures.values())).summary)
    except AssertionError as difference:
        return Row("numbers", case, "wrong", str(difference))
    return check("numbers", case, error, bound)
