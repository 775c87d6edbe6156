"""Layers under torch.compile: the losses of eager mode, and how much faster a step is."""

from collections.abc import Iterator

import torch
from nxd_engine.models import LlamaDecoderLayer
from nxd_state.device import get_device

from gpu_check.llama import ours, size_for
from gpu_check.ranks import on_ranks
from gpu_check.rows import Row, check
from gpu_check.timing import seconds_of


def rows(device: str) -> Iterator[Row]:
    """The losses of five steps, and the time of one."""
    ((eager, eager_seconds),) = on_ranks(device, losses_and_seconds, 1, False)
    ((compiled, compiled_seconds),) = on_ranks(device, losses_and_seconds, 1, True, timeout=300.0)
    error = max(abs(a - b) / a for a, b in zip(eager, compiled, strict=True))
    yield check("compiled", "losses of a Llama, bfloat16", error, 1e-2)
    yield Row("compiled", "time of a step", "measured", f"{compiled_seconds / eager_seconds:.2f} of eager mode's")


def losses_and_seconds(compiled: bool) -> tuple[list[float], float]:
    """Five losses of the same tokens, and the seconds of a step."""
    device = get_device()
    size = size_for(device)
    torch.manual_seed(0)
    model, optimizer = ours(size, device)
    if compiled:
        for layer in model.modules():
            if isinstance(layer, LlamaDecoderLayer):
                layer.compile()
    torch.manual_seed(1)
    batch = size.tokens(device)

    def step() -> torch.Tensor:
        loss = model.run_train(**batch)
        optimizer.step()
        optimizer.zero_grad()
        assert isinstance(loss, torch.Tensor)
        return loss.detach()

    losses = torch.stack([step() for _ in range(5)]).tolist()
    return losses, seconds_of(step, device)
