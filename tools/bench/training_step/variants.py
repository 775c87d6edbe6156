"""What is compared: the same weights and the same step, computed by ours, by plain PyTorch and by DTensor."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from nxd_engine.models import LlamaForCausalLM
from nxd_state import active_group
from processes.over_gloo import over_gloo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from training_step.dtensor_llama import DTensorLlama
from training_step.plain_llama import PlainLlama
from training_step.sizes import Size

Context = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Variant:
    """One way to compute the step.

    Attributes:
        name: as printed.
        build: makes the model from the plain one, which it may take over.
        context: in which forward and backward run.
    """

    name: str
    build: Callable[[PlainLlama, Size], nn.Module]
    context: Context = nullcontext


def build_plain(plain: PlainLlama, size: Size) -> nn.Module:
    return plain


def build_ours(plain: PlainLlama, size: Size, *, sequence_parallel: bool = False) -> nn.Module:
    """Our Llama with this rank's part of the plain model's weights."""
    model = LlamaForCausalLM(size.config, sequence_parallel=sequence_parallel)
    group = active_group("tp")
    whole = plain.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            split_dim: int | None = getattr(parameter, "partition_dim", None)
            weight = whole[name]
            parameter.copy_(weight if split_dim is None else weight.chunk(group.size, dim=split_dim)[group.rank])
    return model


def build_dtensor(plain: PlainLlama, size: Size, *, parallel_loss: bool, sequence_parallel: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (active_group("tp").size,))
    return DTensorLlama(plain, mesh, parallel_loss=parallel_loss, sequence_parallel=sequence_parallel)


def _dtensor(name: str, *, parallel_loss: bool, sequence_parallel: bool) -> Variant:
    build = partial(build_dtensor, parallel_loss=parallel_loss, sequence_parallel=sequence_parallel)
    return Variant(name, build, loss_parallel if parallel_loss else nullcontext)


PLAIN = Variant("plain PyTorch", build_plain)
OURS = Variant("ours", build_ours)
OURS_OVER_GLOO = Variant("ours, over gloo", build_ours, over_gloo)
OURS_SEQUENCE_PARALLEL = Variant("ours, sequence parallel", partial(build_ours, sequence_parallel=True))
DTENSOR = (
    _dtensor("DTensor", parallel_loss=False, sequence_parallel=False),
    _dtensor("DTensor, loss parallel", parallel_loss=True, sequence_parallel=False),
    _dtensor("DTensor, sequence parallel", parallel_loss=False, sequence_parallel=True),
    _dtensor("DTensor, sequence and loss parallel", parallel_loss=True, sequence_parallel=True),
)
