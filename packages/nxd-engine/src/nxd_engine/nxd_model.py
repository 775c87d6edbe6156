"""`NxDModel`: a parallel model with the interface of an ordinary module, wherever its parts are placed."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self
from weakref import WeakSet

import torch
from nxd_layers.experts import BalanceConfig, RouterBalance, RouterLayer
from nxd_lora import LoraConfig, LoraModel, TargetLayers
from nxd_pipeline import GradientSync, NxDPPModel, current_microbatch
from nxd_state.sharded_values import check_whole
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

_models: "WeakSet[NxDModel]" = WeakSet()  # all that live, for `_models_of`


class NxDModel(nn.Module):
    """The model that `initialize_parallel_model` returns. Names are those of the user's model.

    Parameters, buffers, modules and children, also in `state_dict`, are those of this rank: its parts of the tensors,
    and with a pipeline its stages.

    Attributes:
        pipeline: the runtime, even with a single stage.
        module: the wrapped module: the user's model, or the pipeline if the model is cut into stages.
        lora_model: the adapters on this rank; None if there are none, see `add_adapters`.
        router_balance: counts the tokens of experts and trains routers; None without it, see `balance_experts`.
        nxd_config: the complete config that the model was made from.
        config: the model's config, if it has one.
        name_or_path: source of a transformers model; None for other models.
    """

    config: Any
    name_or_path: str

    def __init__(self, module: nn.Module, pipeline: NxDPPModel, nxd_config: Mapping[str, Any]) -> None:
        super().__init__()
        self.pipeline = pipeline
        self.nxd_config = dict(nxd_config)
        self._stages = [part for name, part in pipeline.local_named_modules() if not name]
        self._is_cut = self._stages[0] is not module
        self.module = pipeline if self._is_cut else module
        self.lora_model: LoraModel | None = None
        self.router_balance: RouterBalance | None = None
        names = (nxd_config["pipeline_config"] or {}).get("input_names")
        self._input_names = list(names) if names is not None else _positional_names(module.forward)
        for name in ("config", "name_or_path"):
            if hasattr(module, name):
                setattr(self, name, getattr(module, name))
        _models.add(self)

    def __getattr__(self, name: str) -> Any:  # attributes and methods that the user's model has
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "_is_cut" not in self.__dict__:
                raise
            return getattr(self.module, name)

    @property
    def stages(self) -> list[nn.Module]:
        """The unwrapped model, or with a pipeline this rank's stages of it."""
        return list(self._stages)

    def local_module(self) -> nn.Module:
        """Return the unwrapped model; with a pipeline, this rank's stage of it, or a list of its stages."""
        return self._stages[0] if len(self._stages) == 1 else nn.ModuleList(self._stages)

    def add_adapters(self, config: LoraConfig, layers: TargetLayers) -> LoraModel:
        """Add adapters to layers of this rank; afterwards only the adapters train. Called by all ranks.

        Args:
            config: the adapters' config; a pipeline's stages are adapted as their model would be.
            layers: the layers of the whole model to adapt, from `find_target_layers`.

        Returns:
            The adapters, also available as `lora_model`.
        """
        self.lora_model = LoraModel(self if self._is_cut else self._stages[0], config, layers=layers)
        self.pipeline.tie_added_parameters()
        return self.lora_model

    def balance_experts(self, config: BalanceConfig, layers: Mapping[str, RouterLayer]) -> RouterBalance:
        """Have `run_train` count the tokens of experts, and add the routers' losses to the loss and its gradients.

        The losses cover the global batch of a call, as in one process. With a load-balancing loss and microbatches or
        a pipeline, the forwards are computed twice, since the first backward needs the counts of the last forward.
        Padding, given by `attention_mask` or `router_balance.padding_mask`, is not counted.

        Args:
            config: the losses to add.
            layers: the routers of the whole model, from `nxd_layers.hf.find_routers`.

        Returns:
            The balance, also available as `router_balance`.

        Raises:
            ValueError: the routers do not support it.
        """
        balance = self.router_balance = RouterBalance(dict(self.named_modules()), layers, config)
        if not self._is_cut:
            self._stages[0].register_forward_hook(lambda *_: balance.forward_is_done())
        return balance

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model.

        Raises:
            RuntimeError: the model is cut into stages; use `run_train` or `run_eval`.
        """
        if self._is_cut:
            raise RuntimeError(
                "this model is cut into pipeline stages, so no rank can run it alone; call run_train or run_eval"
            )
        return self._stages[0](*args, **kwargs)

    def run_train(self, *args: Any, **kwargs: Any) -> Tensor | list[Tensor] | None:
        """Run forward and backward of a batch; gradients are added to the parameters' existing gradients.

        With an optimizer of `initialize_parallel_optimizer`, they are averaged over the replicas while the last
        microbatch's backward is still running; with ZeRO each rank keeps only the mean of its part, and `.grad` is
        None. The optimizer's `zero_grad` drops them; if you run a further backward yourself, run it on every rank.
        To accumulate over several calls before an optimizer step, put all but the last into `no_sync`.

        `torch.autocast` around the call applies to the forward passes.

        Args:
            *args: inputs, in the order of `input_names`, or of the model's forward by default.
            **kwargs: inputs by name.

        Returns:
            The mean loss of the microbatches. With a pipeline the last stage has it and other ranks get None, unless
            `broadcast_and_average_loss` is set; with `return_mb_loss` it is a list.

        Raises:
            ValueError: inputs do not fit the model, or it returned no loss.
        """
        inputs = self._named(args, kwargs)
        if self.router_balance is None:
            return self.pipeline.run_train(**inputs)
        return self._run_balanced(self.router_balance, inputs)

    def _run_balanced(self, balance: RouterBalance, inputs: Mapping[str, Any]) -> Tensor | list[Tensor] | None:
        num_microbatches = (self.nxd_config["pipeline_config"] or {}).get("num_microbatches", 1)
        sizes = [it.shape for it in inputs.values() if isinstance(it, Tensor) and it.dim()]
        batch_size = max((size[0] for size in sizes), default=0)
        length = next((size[1] for size in sizes if len(size) > 1), 1)
        given = inputs.get("attention_mask")
        mask, balance.padding_mask = balance.padding_mask if given is None else given, None
        count = partial(self.pipeline.run_eval, **inputs)
        loss = balance.train(
            partial(self.pipeline.run_train, **inputs),
            count=count if self._is_cut or num_microbatches > 1 else None,
            num_microbatches=num_microbatches,
            num_sequences=batch_size // num_microbatches,
            num_tokens=batch_size * length,
            tokens=self._tokens_of(mask, batch_size, num_microbatches),
            microbatch=current_microbatch,
            loss_scale=self.pipeline.loss_scale,
        )
        assert balance.statistics is not None  # of this step
        of_routers = balance.statistics.loss
        if of_routers is None or loss is None:
            return loss
        losses = loss if isinstance(loss, list) else [loss]
        sums = [(it + of_routers.to(it.device)).to(it.dtype) for it in losses]
        return sums if isinstance(loss, list) else sums[0]

    def _tokens_of(self, mask: Any, batch_size: int, num_microbatches: int) -> Sequence[Tensor] | None:
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            given = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"attention_mask is {given}; to balance experts, pass [batch, length] with 0 for padding")
        return mask.bool().expand(batch_size, -1).chunk(num_microbatches)

    def run_eval(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward of a batch, without gradients.

        Args:
            *args: inputs, as for `run_train`.
            **kwargs: inputs by name.

        Returns:
            As for `run_train` if the model returns a loss, else the list of the microbatches' outputs.
        """
        return self.pipeline.run_eval(**self._named(args, kwargs))

    def no_sync(self) -> AbstractContextManager[None]:
        """A block in which `run_train` only accumulates gradients, as in DistributedDataParallel; `step` sends them.

        Without it the gradients are the same, but every call communicates.
        """
        return self.pipeline.no_sync()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of this rank's first floating-point parameter."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank by name; without `remove_duplicate`, a tied one under all its names, of any stage."""
        if not self._is_cut:
            return self._stages[0].named_parameters(prefix, recurse, remove_duplicate)
        named = self.pipeline.local_named_parameters()
        return _under(prefix, named if remove_duplicate else self._every_name(named), recurse=recurse)

    def _every_name(self, named: Iterator[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
        first_names = self.pipeline.tied_names()
        names: dict[str, list[str]] = {first: [first] for first in first_names.values()}
        for further, first in first_names.items():
            names[first].append(further)
        for name, parameter in named:
            yield from ((every, parameter) for every in names.get(first_names.get(name, name), [name]))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers of this rank by name."""
        if not self._is_cut:
            return self._stages[0].named_buffers(prefix, recurse, remove_duplicate)
        return _under(prefix, self.pipeline.local_named_buffers(), recurse=recurse)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Modules of this rank by name; the model itself, or each of its stages, has the name ""."""
        if not self._is_cut:
            yield from self._stages[0].named_modules(memo, prefix, remove_duplicate)
            return
        seen = set() if memo is None else memo
        for name, module in self.pipeline.local_named_modules():
            if module not in seen or not remove_duplicate:
                seen.add(module)
                yield f"{prefix}.{name}".strip("."), module

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules directly below the model that are on this rank."""
        return ((name, module) for name, module in self.named_modules() if name and "." not in name)

    def get_submodule(self, target: str) -> nn.Module:  # get_parameter() and get_buffer() look in it
        """Return this rank's module of this name, as in `named_modules`.

        Raises:
            AttributeError: there is no such module, or it is on another rank.
        """
        for name, module in self.named_modules():
            if name == target:
                return module
        raise AttributeError(f"this rank has no module {target!r}; named_modules() lists its modules")

    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """This rank's parameters and persistent buffers by name; see `torch.nn.Module.state_dict`.

        Raises:
            RuntimeError: the parameters are sharded over the replicas (ZeRO-3).
        """
        if not keep_vars:
            check_whole(self.parameters(), "state_dict()")
        found: dict[str, Any] = {} if destination is None else destination
        of_stages = self.pipeline.local_state_dict if self._is_cut else self._stages[0].state_dict
        state = of_stages(keep_vars=True)
        for name, value in state.items():  # a module's extra state may be anything
            found[prefix + name] = value.detach() if isinstance(value, Tensor) and not keep_vars else value
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Copy values from a `state_dict` of this rank; stages also accept the whole model's.

        Raises:
            RuntimeError: names or shapes do not fit, or the parameters are sharded over the replicas (ZeRO-3).
            ValueError: the same with a pipeline, or `assign` with a pipeline.
        """
        check_whole(self.parameters(), "load_state_dict()")
        if not self._is_cut:
            return self._stages[0].load_state_dict(state_dict, strict, assign)
        if assign:
            raise ValueError("assign=True would replace parameters that the pipeline's runtime holds; leave it out")
        missing = self.pipeline.local_state_dict().keys() - state_dict.keys()
        self.pipeline.load_local_state_dict(state_dict, strict=strict)
        return _IncompatibleKeys(sorted(missing), [])

    @property
    def training(self) -> bool:
        """Whether the model is in training mode: that of its own module, as `named_modules` lists no other."""
        return self._stages[0].training

    @training.setter
    def training(self, mode: bool) -> None:
        for stage in self.__dict__.get("_stages", ()):  # nn.Module's constructor sets it before there are stages
            stage.training = mode

    def train(self, mode: bool = True) -> Self:
        """Put the model's modules on this rank in training mode, or with False in evaluation mode."""
        for stage in self._stages:
            stage.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call `fn` with every module of the model on this rank, submodules first."""
        for stage in self._stages:
            stage.apply(fn)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # behind to(), float(), cuda() ...
        self.pipeline._apply(fn, recurse)
        return self

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if len(args) > len(self._input_names):
            raise ValueError(
                f"got {len(args)} positional inputs, but the model has {len(self._input_names)} named ones: "
                f"{', '.join(self._input_names)}"
            )
        by_position = dict(zip(self._input_names, args, strict=False))
        twice = sorted(by_position.keys() & kwargs.keys())
        if twice:
            raise ValueError(f"the inputs {twice} are given both by position and by name; pass each once")
        return {**by_position, **kwargs}

    def __repr__(self) -> str:
        return f"NxDModel({self.module})"


def sync_gradients(parameters: Iterable[Tensor], sync: GradientSync) -> None:
    """Make `run_train` of the models that hold some of these parameters average gradients by `sync`, while it lives."""
    wanted = set(parameters)
    for model in _models_of(wanted):
        model.pipeline.sync_gradients_by(sync, wanted)


def names_of(parameters: Iterable[Tensor]) -> dict[Tensor, str]:
    """Return the names of parameters in their models; copies of a tied weight have the first one's name."""
    names: dict[Tensor, str] = {}
    for model in _models_of(set(parameters)):
        first_names = model.pipeline.tied_names()
        names |= {parameter: first_names.get(name, name) for name, parameter in model.named_parameters()}
    return names


def _models_of(parameters: Set[Tensor]) -> list[NxDModel]:
    """Return the models that hold some of these parameters.

    The documented `initialize_parallel_optimizer` receives parameters and no model, so its optimizer finds the model
    here. Parameters are compared when asked, since adapters and moves to a device change those of a model.
    """
    return [model for model in list(_models) if not parameters.isdisjoint(model.parameters())]


def _positional_names(forward: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [it.name for it in inspect.signature(forward).parameters.values() if it.kind in kinds]


def _under(prefix: str, named: Iterator[tuple[str, Any]], *, recurse: bool) -> Iterator[tuple[str, Any]]:
    return ((f"{prefix}.{name}".lstrip("."), value) for name, value in named if recurse or "." not in name)
