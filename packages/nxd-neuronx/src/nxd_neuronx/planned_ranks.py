"""Ranks that are planned and do not run, in which scripts make, trace and shard models for inference."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self
from unittest import mock

import nxd_trace
import torch.distributed as dist
from nxd_state import (
    destroy_model_parallel,
    get_tensor_model_parallel_size,
    initialize_model_parallel,
    model_parallel_is_initialized,
    planned_world,
)
from nxd_trace import TensorParallelModel
from torch import Tensor, nn

from nxd_neuronx.platform import get_platform_lnc
from nxd_neuronx.tensors import invoke_preshard_hooks


@contextmanager
def mock_distributed(world_size: int) -> Iterator[None]:
    """A block in which ranks are planned and do not run: `init_process_group` takes a rank and starts nothing.

    Models can be made, traced and sharded there, and not called. `initialize_model_parallel` lays out `world_size`
    ranks, of which this process acts as rank 0.

    Args:
        world_size: world size of the job that is planned.
    """
    with planned_world(world_size), ExitStack() as patches:
        for name, value in (("init_process_group", None), ("destroy_process_group", None), ("get_rank", 0)):
            patches.enter_context(mock.patch.object(dist, name, mock.Mock(return_value=value)))
        patches.enter_context(mock.patch.object(dist, "get_world_size", mock.Mock(return_value=world_size)))
        yield


class NxDParallelState:
    """A block with a mesh: of ranks that are planned, or of those that run where torch.distributed is started.

    Args:
        world_size: ranks that are planned.
        rank: to act as.
        tensor_model_parallel_size: ranks that split each layer.
        pipeline_model_parallel_size: pipeline stages.
        context_parallel_size: ranks that split each sequence.
        expert_model_parallel_size: ranks that split experts.
        lnc_size: physical cores of a logical one; accepted without effect.

    Raises:
        RuntimeError: on entry: model parallelism is initialized.
        ValueError: on entry: degrees that do not divide the world size.
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
    """Each rank's shards of a whole model's weights.

    Args:
        checkpoint: whole tensors by name; for a traced model anything that `replace_weights` takes. A module's
            `preshard_hook(checkpoint, name)` may change it first.
        model: as a rank has it, made inside `NxDParallelState`; or a traced model.
        start_rank: the first rank; 0 if None.
        end_rank: the last rank, included; the last one there is if None.
        load_on_device: accepted without effect; tensors stay on the host.
        serialize_path: folder to write `tp<rank>_sharded_checkpoint.safetensors` to as well.

    Returns:
        A dict for each rank.

    Raises:
        ValueError: weights do not fit the model, or there is no such rank.
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
