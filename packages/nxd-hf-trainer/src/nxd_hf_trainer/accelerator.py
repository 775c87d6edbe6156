"""`Accelerator.prepare` and what follows it: the script's models and optimizers become parallel ones.

These are public methods of Accelerate; Trainer calls them for its training, too.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from nxd_engine import NxDOptimizer
from nxd_engine.hugging_face import whole_state_dict
from nxd_state import all_ranks, get_group
from torch import Tensor, nn
from torch.optim import Optimizer

from nxd_hf_trainer.models import SplitModels, parallel_model_in
from nxd_hf_trainer.optimizers import parallel_optimizer
from nxd_hf_trainer.refusals import check_accelerator, check_norm_type
from nxd_hf_trainer.replacing import Replacement, replaced
from nxd_hf_trainer.saved_states import load_state_at_a_layout, save_state_at_a_layout


@contextmanager
def accelerator_prepares_ours(config: Mapping[str, Any]) -> Iterator[None]:
    """Context in which an Accelerator makes parallel models and optimizers by a config."""
    prepared = Prepared(config)
    replacements: dict[str, Replacement] = {
        "prepare": lambda own: _prepare(own, prepared),
        "prepare_model": lambda own: _prepare_model(own, prepared.models),
        "prepare_optimizer": lambda own: _prepare_optimizer(own, prepared),
        "backward": lambda own: _backward(own, prepared),
        "clip_grad_norm_": lambda own: _clip_grad_norm(own, prepared),
        "clip_grad_value_": lambda _: _refuse_clip_grad_value,
        "unwrap_model": lambda own: _unwrap_model(own, prepared.models),
        "get_state_dict": _get_state_dict,
        "save_state": lambda own: save_state_at_a_layout(own, prepared.models),
        "load_state": lambda own: load_state_at_a_layout(own, prepared.models),
    }
    with replaced(Accelerator, replacements):
        yield


class Prepared:
    """What the Accelerators of a script have prepared.

    Args:
        config: the complete config of the layout.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.models = SplitModels(config)
        self._numbers = count()
        self._optimizers: WeakValueDictionary[int, NxDOptimizer] = WeakValueDictionary()  # by their numbers

    def optimizer(self, given: Optimizer) -> NxDOptimizer:
        """Return the parallel optimizer that takes the place of a script's. Called by all ranks."""
        made = parallel_optimizer(given, self.models)
        self._optimizers[next(self._numbers)] = made
        return made

    def optimizers(self) -> list[NxDOptimizer]:
        """Return the parallel optimizers that the script still has, in the same order on all ranks."""
        return list(self._optimizers.values())


def _prepare(own: Any, prepared: Prepared) -> Any:
    def prepare(accelerator: Accelerator, *args: Any, device_placement: Any = None) -> Any:
        check_accelerator(accelerator)
        # Models first: an optimizer's parameters are looked up in them.
        args = tuple(prepared.models.split(it) if isinstance(it, nn.Module) else it for it in args)
        made = {id(it): prepared.optimizer(it) for it in args if _is_plain(it)}
        return own(accelerator, *(made.get(id(it), it) for it in args), device_placement=device_placement)

    return prepare


def _is_plain(given: Any) -> bool:
    return isinstance(given, Optimizer) and not isinstance(given, (AcceleratedOptimizer, NxDOptimizer))


def _prepare_model(own: Any, models: SplitModels) -> Any:
    def prepare_model(
        accelerator: Accelerator, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        check_accelerator(accelerator)
        # In evaluation mode Accelerate adds what is local (autocast, compilation), and no DistributedDataParallel.
        return own(accelerator, models.split(model), device_placement=False, evaluation_mode=True)

    return prepare_model


def _prepare_optimizer(own: Any, prepared: Prepared) -> Any:
    def prepare_optimizer(accelerator: Accelerator, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        if _is_plain(optimizer):
            optimizer = prepared.optimizer(optimizer)
        return own(accelerator, optimizer, device_placement=False)

    return prepare_optimizer


def _backward(own: Any, prepared: Prepared) -> Any:
    def backward(accelerator: Accelerator, loss: Tensor, **kwargs: Any) -> None:
        if get_group("pp").size > 1:  # the pipeline's own training step sends gradients
            own(accelerator, loss, **kwargs)
            prepared.models.finish_backward()
            return
        with ExitStack() as blocks:
            for optimizer in prepared.optimizers():  # from ZeRO-2 on each rank keeps its part of gradients
                parameters = [it for group in optimizer.param_groups for it in group["params"]]
                blocks.enter_context(optimizer.backward_of(parameters, ()))
            own(accelerator, loss, **kwargs)

    return backward


def _clip_grad_norm(own: Any, prepared: Prepared) -> Any:
    def clip_grad_norm_(accelerator: Accelerator, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        check_norm_type(norm_type)
        optimizers = prepared.optimizers()
        if not optimizers:
            return own(accelerator, parameters, max_norm, norm_type)
        if len(optimizers) > 1:
            wanted = {id(it) for it in parameters}
            optimizers = [
                it
                for it in optimizers
                if any(id(its) in wanted for group in it.param_groups for its in group["params"])
            ]
        if len(optimizers) != 1:
            raise ValueError(
                f"the parameters to clip belong to {len(optimizers)} prepared optimizers; pass those of one"
            )
        prepared.models.finish_backward()
        if not accelerator.sync_gradients:
            raise RuntimeError(
                "clip_grad_norm_ was called while gradients are still accumulated; call it if "
                "accelerator.sync_gradients is true"
            )
        return optimizers[0].clip_grad_norm(max_norm)

    return clip_grad_norm_


def _refuse_clip_grad_value(accelerator: Accelerator, parameters: Any, clip_value: float) -> None:
    raise ValueError(
        "clip_grad_value_ would clip each rank's own gradients before they are summed; use clip_grad_norm_"
    )


def _unwrap_model(own: Any, models: SplitModels) -> Any:
    def unwrap_model(accelerator: Accelerator, model: Any, *args: Any, **kwargs: Any) -> Any:
        parallel = parallel_model_in(model)
        return own(accelerator, model, *args, **kwargs) if parallel is None else models.module_of(parallel)

    return unwrap_model


def _get_state_dict(own: Any) -> Any:
    def get_state_dict(accelerator: Accelerator, model: Any, unwrap: bool = True) -> Any:
        """Return the whole tensors on the main process, and an empty dict on others, as with FSDP."""
        parallel = parallel_model_in(model)
        if parallel is None:
            return own(accelerator, model, unwrap)
        with all_ranks():
            return whole_state_dict(parallel)

    return get_state_dict
