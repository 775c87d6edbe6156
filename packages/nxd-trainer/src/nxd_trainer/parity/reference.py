"""Runs the compared steps in one process, with plain PyTorch: whole batches, whole tensors, no parallel runtime.

The records of a step, the modules' outputs and the order of the gradients, are here as well.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from nxd_engine.adapters import initialize_lora_model
from nxd_engine.checkpoints.state import logical_name
from nxd_pipeline.runtime.loss import check_loss, pick_loss
from nxd_state import ShardSpec, get_device, get_shard_spec, move_model_to_device
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nxd_trainer.parity.case import ParityCase, inputs_in, make_model


class ActivationRecord:
    """The outputs of modules by name, in execution order; several outputs of a module are `name[0]`, ...

    Attributes:
        outputs: for each module, a CPU copy of its output per call.
    """

    def __init__(self) -> None:
        self.outputs: dict[str, list[Tensor]] = {}

    @contextmanager
    def watching(self, modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
        """Record inside the `with` block. The model itself, named "", is omitted because it returns the loss."""
        handles = [module.register_forward_hook(self._hook(name)) for name, module in modules if name]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # backward is running: activation checkpointing recomputes the module
            found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            for index, tensor in enumerate(found):
                key = f"{name}[{index}]" if len(found) > 1 else name
                self.outputs.setdefault(key, []).append(tensor.detach().cpu().clone())

        return record


@contextmanager
def gradient_order(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[list[str]]:
    """Yield a list that gets parameters' names in the order in which backward in the block gives them gradients."""
    order: dict[str, None] = {}

    def hook(name: str) -> Any:
        return lambda parameter: order.setdefault(name)

    handles = [it.register_post_accumulate_grad_hook(hook(name)) for name, it in parameters if it.requires_grad]
    names: list[str] = []
    try:
        yield names
    finally:
        names.extend(order)
        for handle in handles:
            handle.remove()


def spec_of(parameter: Tensor) -> ShardSpec:
    """Return the shard spec of a parameter, also if it is not sharded."""
    return get_shard_spec(parameter) or ShardSpec.whole(parameter.shape)


@dataclass
class ReferenceStep:
    """The results of one process in a step.

    Attributes:
        activations: outputs of modules by name, one per call, in execution order.
        loss: the loss, a 0-d tensor.
        gradients: gradients by logical name, in the order of backward, before clipping.
        grad_norm: the norm of all gradients before clipping.
        parameters: parameters after the step, by logical name.
    """

    activations: dict[str, list[Tensor]]
    loss: Tensor
    gradients: dict[str, Tensor]
    grad_norm: Tensor
    parameters: dict[str, Tensor]


@dataclass
class Reference:
    """The steps of one process, and the weights before the first."""

    initial: dict[str, Tensor]
    steps: list[ReferenceStep]


def run_reference(case: ParityCase, config: Mapping[str, Any], dtype: torch.dtype) -> Reference:
    """Train one process on the whole batches, without communication. The mesh must have no TP and no PP.

    Args:
        case: the case to compare.
        config: its complete config; only keys that change the numbers are used.
        dtype: dtype of weights and inputs.
    """
    model = make_model(case.reference_fn or case.model_fn, case.seed, dtype)
    if config["lora_config"] is not None:
        initialize_lora_model(model, config["lora_config"])
    move_model_to_device(model, get_device())
    optimizer = case.optimizer_class(case.parameter_groups(model), **case.optimizer_arguments)
    reference = Reference(_logical((name, it, it) for name, it in model.named_parameters()), [])
    for batch in case.batches:
        reference.steps.append(_step(model, optimizer, inputs_in(dtype, batch), config))
    return reference


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Any], config: Mapping[str, Any]
) -> ReferenceStep:
    optimizer.zero_grad()
    record = ActivationRecord()
    with record.watching(model.named_modules()), gradient_order(model.named_parameters()) as order:
        output = model(**batch)
        spec = (config["pipeline_config"] or {}).get("output_loss_value_spec")
        if spec is None and not isinstance(output, Tensor):
            spec = {"loss": True}  # the name in transformers models
        loss = check_loss(pick_loss(output, spec))
        loss.backward()
    named = dict(model.named_parameters())
    gradients = _logical((name, named[name], named[name].grad) for name in order)
    options = config["optimizer_config"]
    limit = options["max_grad_norm"] if options["grad_clipping"] else float("inf")
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
    return ReferenceStep(
        record.outputs,
        loss.detach().cpu(),
        gradients,
        norm.detach().cpu(),
        _logical((name, it, it) for name, it in named.items()),
    )


def _logical(named: Any) -> dict[str, Tensor]:
    """Return tensors by logical name: a fused parameter appears under the names of its parts."""
    whole: dict[str, Tensor] = {}
    for name, parameter, tensor in named:
        spec = spec_of(parameter)
        targets = {
            relative: whole.setdefault(logical_name(name, relative), torch.zeros(shape, dtype=tensor.dtype))
            for relative, shape in spec.logical_shapes.items()
        }
        spec.copy_to_logical(tensor, targets)
    return whole
