"""Planned ranks, which do not run: scripts build, trace and shard models for inference on them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import nxd_trace
import torch
import torch.distributed as dist
from nxd_engine.build import parameters_on_meta
from nxd_state import (
    destroy_model_parallel,
    get_tensor_model_parallel_size,
    initialize_model_parallel,
    model_parallel_is_initialized,
    planned_world,
)
from nxd_trace import TensorParallelModel
from torch import Tensor, nn

from nxd_neuronx.process import get_platform_lnc
from nxd_neuronx.tensors import invoke_preshard_hooks


@contextmanager
def mock_distributed(world_size: int) -> Iterator[None]:
    """Plan `world_size` ranks inside the block: `init_process_group` starts nothing, and this process is rank 0.

    Models can be built, traced and sharded inside, but not called.
    """
    answers = {"init_process_group": None, "destroy_process_group": None, "get_rank": 0, "get_world_size": world_size}
    functions = {name: getattr(dist, name) for name in answers}
    with planned_world(world_size):
        try:
            for name, answer in answers.items():
                setattr(dist, name, _function_that_returns(answer))
            yield
        finally:
            for name, function in functions.items():
                setattr(dist, name, function)


def _function_that_returns(answer: int | None) -> Callable[..., int | None]:
    return lambda *args, **kwargs: answer


class NxDParallelState:
    """A context manager with a mesh: of running ranks if torch.distributed is initialized, else of planned ranks.

    Args:
        world_size: number of planned ranks.
        rank: the rank that this process acts as.
        tensor_model_parallel_size: number of ranks that split each layer.
        pipeline_model_parallel_size: number of pipeline stages.
        context_parallel_size: number of ranks that split each sequence.
        expert_model_parallel_size: number of ranks that split the experts.
        lnc_size: physical cores in a logical core; accepted without effect.

    Raises:
        RuntimeError: on entry, if model parallelism is already initialized.
        ValueError: on entry, if the degrees do not divide the world size.
    """

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        lnc_size: int | None = None,
    ) -> None:
        self.world_size = world_size
        self.rank = rank
        self.tensor_model_parallel_size = tensor_model_parallel_size
        self.pipeline_model_parallel_size = pipeline_model_parallel_size
        self.context_parallel_size = context_parallel_size
        self.expert_model_parallel_size = expert_model_parallel_size
        self.lnc_size = int(get_platform_lnc()) if lnc_size is None else lnc_size
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if not dist.is_initialized():
                stack.enter_context(planned_world(self.world_size, self.rank))
            initialize_model_parallel(
                self.tensor_model_parallel_size,
                self.pipeline_model_parallel_size,
                self.expert_model_parallel_size,
                context_parallel_size=self.context_parallel_size,
            )
            stack.callback(destroy_model_parallel)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def shard_checkpoint(
    checkpoint: Mapping[str, Tensor] | Any,
    model: nn.Module,
    start_rank: int | None = None,
    end_rank: int | None = None,
    load_on_device: bool = False,
    serialize_path: str | Path | None = None,
) -> list[dict[str, Tensor]]:
    """Return each rank's shards of a whole model's weights, a dict per rank.

    Args:
        checkpoint: whole tensors by name; for a traced model, anything that `replace_weights` accepts. A module's
            `preshard_hook(checkpoint, name)` may change it first.
        model: one rank's model, built inside `NxDParallelState`; or a traced model.
        start_rank: first rank; 0 if None.
        end_rank: last rank, inclusive; the last tensor-parallel rank if None.
        load_on_device: accepted without effect; tensors stay on the host.
        serialize_path: folder in which to write `tp<rank>_sharded_checkpoint.safetensors` too.

    Raises:
        ValueError: the weights do not fit the model, or a rank is out of range.
    """
    if isinstance(model, TensorParallelModel):
        return nxd_trace.shard_checkpoint(checkpoint, model)
    size = get_tensor_model_parallel_size() if model_parallel_is_initialized() else 1
    first, last = start_rank or 0, size - 1 if end_rank is None else end_rank
    if not 0 <= first <= last < size:
        raise ValueError(f"start_rank={start_rank}, end_rank={end_rank} are outside the {size} tensor-parallel ranks")
    whole = dict(checkpoint)
    invoke_preshard_hooks(model, whole)
    return nxd_trace.rank_weights(whole, model, range(first, last + 1), folder=serialize_path)


@contextmanager
def init_on_device(
    device: torch.device | str, include_buffers: bool = False, force_custom_init_on_device: bool = False
) -> Iterator[None]:
    """Create the parameters of modules built inside the block on `device`; on "meta" they take no memory.

    Args:
        device: target device; unless it is "meta", buffers and tensors without a device are created on it too.
        include_buffers: whether "meta" applies to buffers too; otherwise they keep their values.
        force_custom_init_on_device: accepted without effect.
    """
    device = torch.device(device)
    with parameters_on_meta(include_buffers=include_buffers) if device.type == "meta" else device:
        yield
