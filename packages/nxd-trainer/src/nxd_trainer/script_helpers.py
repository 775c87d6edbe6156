"""Undocumented helpers that training scripts for NeuronX Distributed import: an optimizer and small functions.

They are available under the import paths that those scripts use, see `neuronx_distributed`. New code should use the
equivalents in nxd_state, nxd_layers and nxd_optim.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from nxd_layers import divide
from nxd_optim import reduce_sequence_parallel_gradients
from nxd_state import (
    active_group,
    all_reduce_,
    copy_parameter_attributes,
    get_group,
    get_rng_state,
    get_world_group,
    is_host,
    model_parallel_is_initialized,
    records_graphs,
    rng_stream,
    set_partition_attributes,
    set_rng_state,
)
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from torch.utils._pytree import tree_map


class AdamW_FP32OptimParams(Optimizer):  # noqa: N801  (the documented name)
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), computed in float32 or wider.

    A bfloat16 parameter is rounded once a step, after the update. For a float32 copy of the weights as well, use
    ZeRO-1 with `use_master_weights`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
    ) -> None:
        """Take parameters or groups of them.

        Args:
            params: as for any optimizer of torch.
            lr: learning rate.
            betas: decay of the two moments.
            eps: added to the root of the second moment.
            weight_decay: share of the weights, times `lr`, that goes at each step, after the update.
            correct_bias: divide the moments by what they lack in the first steps.

        Raises:
            ValueError: a number is out of its range.
        """
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        wrong = [f"{name}={number}" for name, number in numbers.items() if not number >= 0]
        wrong += [f"betas[{index}]={beta}" for index, beta in enumerate(betas) if not 0 <= beta < 1]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: lr, eps and weight_decay must be 0 or more, betas from 0 to below 1")
        super().__init__(params, {**numbers, "betas": betas, "correct_bias": correct_bias})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns what `closure` did."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state; moments stay float32, which torch's own would turn into the parameters' dtype."""
        super().load_state_dict(state_dict)
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(ids, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    self.state[parameter][name] = value.to(parameter.device, copy=True)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        wide = torch.promote_types(parameter.dtype, torch.float32)
        gradient, weights = parameter.grad.to(wide), parameter.to(wide)  # type: ignore[union-attr]
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(gradient)
            state["exp_avg_sq"] = torch.zeros_like(gradient)
        state["step"] += 1
        first, second = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        rate = group["lr"]
        if group["correct_bias"]:
            steps = float(state["step"])
            rate = rate * (1 - second**steps) ** 0.5 / (1 - first**steps)
        weights = weights - rate * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
        parameter.copy_(weights * (1 - group["lr"] * group["weight_decay"]))


@torch.no_grad()
def bucket_allreduce_gradients(grads_list: Iterable[Tensor]) -> None:
    """Average gradients over the replicas, in place: one message for each dtype.

    Args:
        grads_list: the same, in the same order, on every replica.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in grads_list:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        all_reduce_(flat, get_group("dp"), op="avg")
        for gradient, values in zip(gradients, flat.split([it.numel() for it in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))


def allreduce_sequence_parallel_gradients(optimizer: Optimizer) -> None:
    """Add up, over the tensor-parallel ranks, the gradients of an optimizer's sequence-parallel parameters."""
    reduce_sequence_parallel_gradients(
        parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
    )


class RngTracker:
    """Leads to the streams of nxd_state, which `model_parallel_xla_manual_seed` seeds."""

    def fork(self) -> AbstractContextManager[None]:
        """Draw from this tensor-parallel rank's own stream inside the `with` block.

        Raises:
            RuntimeError: the streams are not seeded.
        """
        return rng_stream("tp")

    def get_states(self) -> dict[str, dict[str, Tensor]]:
        """State of every stream, to be saved."""
        return get_rng_state()

    def set_states(self, states: dict[str, dict[str, Tensor]]) -> None:
        """Restore a state of `get_states`."""
        set_rng_state(states)


_TRACKER = RngTracker()


def get_xla_rng_tracker() -> RngTracker:
    """The one tracker of this process, on any device."""
    return _TRACKER


def set_tensor_model_parallel_attributes(
    tensor: Tensor, is_parallel: bool, dim: int, stride: int = 1, num_partitions: int | None = None
) -> None:
    """Say of a tensor how it is split.

    Args:
        tensor: is given the attributes.
        is_parallel: whether it is split.
        dim: along which dim.
        stride: matrices that are fused along it.
        num_partitions: ranks that share it; all tensor-parallel ones if None.
    """
    ranks = active_group("tp").size if num_partitions is None else num_partitions
    set_partition_attributes(tensor, partition_dim=dim, num_partitions=ranks, stride=stride)
    tensor.tensor_model_parallel = is_parallel  # type: ignore[attr-defined]


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Give a tensor the attributes (and the shard metadata) of another of its shape."""
    copy_parameter_attributes(source_tensor, destination_tensor)


def param_is_not_tensor_parallel_duplicate(param: Tensor) -> bool:
    """Whether this rank is to count a parameter: it has a part of its own, or is the first that has it whole."""
    return bool(getattr(param, "tensor_model_parallel", False)) or active_group("tp").rank == 0


def split_tensor_along_dim(
    tensor: Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Equal parts of a tensor.

    Args:
        tensor: what to cut.
        dim: along which dim.
        num_partitions: number of parts.
        contiguous_split_chunks: copy each part into memory of its own.

    Raises:
        ValueError: the number of parts does not divide the length.
    """
    chunks = tensor.split(divide(tensor.shape[dim], num_partitions), dim=dim)
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_split_chunks else chunks


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """`split_tensor_along_dim` for the last dim."""
    return split_tensor_along_dim(tensor, -1, num_partitions, contiguous_split_chunks)


def move_all_tensor_to_cpu(data: Any) -> Any:
    """The same nested lists, tuples and dicts with every tensor on the CPU."""
    return tree_map(lambda value: value.detach().cpu() if isinstance(value, Tensor) else value, data)


@contextmanager
def init_on_device(device: torch.device | str, include_buffers: bool = False) -> Iterator[None]:
    """Modules made inside have their parameters on `device`; on "meta" they take no memory.

    Args:
        device: on others than "meta" buffers, and tensors that name no device, are made there as well.
        include_buffers: with "meta", put buffers there, too; otherwise they have their values.
    """
    from nxd_trainer.api.build import parameters_on_meta  # noqa: PLC0415 - brings in all of the trainer

    device = torch.device(device)
    with parameters_on_meta(include_buffers=include_buffers) if device.type == "meta" else device:
        yield


def get_local_world_size() -> int:
    """Ranks on this host: what the launcher says, else all of them."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return get_world_group().size if model_parallel_is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def is_pjrt_device() -> bool:
    """Whether this process computes through PJRT, the runtime interface of XLA devices."""
    return records_graphs()


def cpu_mode() -> bool:
    """Whether this process computes on the CPU."""
    return is_host()
