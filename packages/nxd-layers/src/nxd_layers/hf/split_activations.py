"""Activations that tensor-parallel ranks have shards of: those between column- and row-parallel layers.

Layers that read the same tensor (query, key and value, or gate and up) sum its gradient once. A learned activation has
a partial gradient on each rank, and the mean of a token's activations, as in Gemma 3n, is one over all ranks.

Torch's generator is the same on tensor-parallel ranks, so that they drop the same elements of tensors that each of them
has in full. Of shards, such as the attention weights of its heads, each rank would repeat the others' masks. So between
a column-parallel layer and the row-parallel one after it, each rank draws numbers of its own (Korthikanti et al. 2022,
"Reducing Activation Recomputation").
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

import torch
from nxd_state import active_group, rng_of_own_rank
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_layers.hf.head_linears import CopiedHeadsLinear
from nxd_layers.hf.layers import mark_partial_gradients
from nxd_layers.hf.plans import join_path
from nxd_layers.hf.transformers_models import is_activation
from nxd_layers.linear import ColumnParallelLinear
from nxd_layers.mappings import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from nxd_layers.shared_input import SharedInput

_SPARSE = "_gaussian_topk"

_Column: TypeAlias = ColumnParallelLinear | CopiedHeadsLinear


def share_inputs(module: nn.Module, *, least: int = 2) -> None:
    """Have column-parallel layers with one parent and inputs of one size sum the gradient of a shared input once.

    Layers that share their input already are left alone.

    Args:
        module: a parallelized module; layers at any depth are included.
        least: the smallest number of layers that share an input. Sharing gains nothing for a single layer, except with
            sequence parallelism.
    """
    for parent in list(module.modules()):
        by_size: dict[int, list[_Column]] = {}
        for child in parent.children():
            if isinstance(child, _Column) and child.shared_input is None and not _gathers_its_input(child):
                by_size.setdefault(child.weight.shape[1], []).append(child)
        for layers in by_size.values():
            if len(layers) >= least:
                _share(parent, layers)


def shared_inputs_of(block: nn.Module) -> list[SharedInput]:
    """Return the shared inputs of the layers in a block."""
    found = (getattr(module, "shared_input", None) for module in block.modules())
    return list(dict.fromkeys(it for it in found if it is not None))


def _gathers_its_input(layer: _Column) -> bool:
    return isinstance(layer, ColumnParallelLinear) and layer.sequence_parallel_enabled


def _share(parent: nn.Module, layers: list[_Column]) -> None:
    shared = SharedInput()
    for layer in layers:
        layer.shared_input = shared
    parent.register_forward_hook(partial(_forget, shared), always_call=True)


def _forget(shared: SharedInput, *_: Any) -> None:
    shared.forget()


def adapt_activations(model: nn.Module, split: Iterable[str], styles: Mapping[str, str]) -> None:
    """Have learned and sparse activations of sharded outputs compute as those of full ones.

    Args:
        model: the model.
        split: paths of the layers whose outputs are sharded.
        styles: the styles of its modules, by path; an activation with a style of its own is left to that style.
    """
    for path in dict.fromkeys(path.rpartition(".")[0] for path in split):
        parent = model.get_submodule(path)
        for name, child in parent.named_children():
            if join_path(path, name) not in styles and is_activation(child):
                mark_partial_gradients(list(child.parameters()))
        sparsity = getattr(parent, "activation_sparsity", 0.0)
        if hasattr(parent, _SPARSE) and sparsity > 0:
            setattr(parent, _SPARSE, partial(gaussian_top_k, _deviations_above_mean(sparsity)))


def gaussian_top_k(deviations: float, inputs: Tensor) -> Tensor:
    """Return by how much each of a token's activations is above a threshold, and 0 for those below it.

    Args:
        deviations: the threshold, in standard deviations above the mean of the token's activations.
        inputs: `[..., size/tp]`.
    """
    size = inputs.shape[-1] * active_group("tp").size
    wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    mean = _sum_over_ranks(wide) / size
    deviation = (_sum_over_ranks((wide - mean).square()) / size).sqrt()
    factor = torch.full((), deviations, dtype=inputs.dtype, device=inputs.device)
    return F.relu(inputs - (mean.to(inputs.dtype) + deviation.to(inputs.dtype) * factor))


def _sum_over_ranks(inputs: Tensor) -> Tensor:
    """Sum `[..., size/tp]` to `[..., 1]`, which each rank uses for its shard of the outputs."""
    total = reduce_from_tensor_model_parallel_region(inputs.sum(dim=-1, keepdim=True))
    return copy_to_tensor_model_parallel_region(total)


def _deviations_above_mean(share: float) -> float:
    """Return the quantile of the normal distribution below which this share lies, rounded as in transformers."""
    below = torch.tensor(share, dtype=torch.float32, device="cpu")
    return float(torch.erfinv(2 * below - 1) * math.sqrt(2))


class PerRankRngHooks:
    """The hooks that have each rank draw its own random numbers for sharded activations of a model.

    Args:
        model: a parallelized model.
        columns: paths of its modules whose outputs are sharded.
        rows: paths of its modules that sum sharded inputs.
    """

    def __init__(self, model: nn.Module, columns: Iterable[str], rows: Iterable[str]) -> None:
        self._stack = ExitStack()
        for path in columns:
            parent = model.get_submodule(path.rpartition(".")[0])
            column = model.get_submodule(path)
            column.register_forward_pre_hook(self._leave)  # an adapter in it has a full input
            column.register_forward_hook(partial(self._enter, parent))
            parent.register_forward_hook(self._leave, always_call=True)
        for path in rows:
            model.get_submodule(path).register_forward_pre_hook(self._leave)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the hooks as outside of such layers."""
        return _outside, ()

    def _enter(self, parent: nn.Module, *_: Any) -> None:
        if parent.training and _drops(parent):
            self._stack.close()
            self._stack.enter_context(rng_of_own_rank())

    def _leave(self, *_: Any) -> None:
        self._stack.close()


def _outside() -> PerRankRngHooks:
    made = PerRankRngHooks.__new__(PerRankRngHooks)
    made._stack = ExitStack()
    return made


def _drops(module: nn.Module) -> bool:
    """Return whether a module has dropout: a probability of its own, or a layer."""
    own = any("drop" in name and isinstance(it, float) and it > 0 for name, it in vars(module).items())
    return own or any(isinstance(it, nn.Dropout) and it.p > 0 for it in module.children())
