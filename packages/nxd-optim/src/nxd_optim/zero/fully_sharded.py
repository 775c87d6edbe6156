"""ZeRO-3: parameters that are sharded over the replicas, and gathered unit by unit while they are used.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", stage 3; the units and
their order are those of Zhao et al. 2023, "PyTorch FSDP". A unit is a module, such as a decoder layer, whose parameters
travel in one message for its forward and in one for its backward, while the unit before it computes. Parameters outside
the units, or in several, are whole from the forward of the model to the end of its backward.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from nxd_state import Group, active_group, is_lazy_device
from nxd_state.parameter_marks import is_expert
from nxd_state.same_start import StartComparison
from nxd_state.sharded_values import check_whole, holder_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nxd_optim.placement import neighbors, require_mesh, sharding_placements
from nxd_optim.zero.flat_parameters import FlatParameters


def fully_shard(
    models: Sequence[nn.Module],
    units: Iterable[nn.Module],
    *,
    shard_group_size: int | None = None,
    reshard_after_forward: bool | int = True,
    offload: bool = False,
) -> "FullySharded":
    """Shard the parameters of models over their replicas (ZeRO-3). Called by all ranks, before the optimizer is made.

    Forward and backward then gather what they use. Elsewhere a parameter has its shape and no values: read and write
    them in a block of `nxd_state.sharded_values.whole_parameters`, and save with nxd-engine's checkpoints.

    Args:
        models: the model, or this rank's stages of it; they may share parameters.
        units: modules of the models whose parameters are gathered together; those of a unit inside another are its own.
        shard_group_size: number of neighboring replicas that share a parameter (hybrid sharding), which the others
            mirror; None for all replicas.
        reshard_after_forward: whether a unit is given up after its forward, and gathered again for its backward. False
            keeps parameters whole until the optimizer's step: more memory, fewer bytes with several microbatches. A
            number keeps them sharded over that many neighboring ranks meanwhile, so that backward gathers from these.
        offload: whether a rank keeps its part of the parameters in host memory, and with it its part of gradients and
            states, which the optimizer then updates there. On the CPU it has no effect.

    Raises:
        ValueError: there are no groups of this size, a unit is not in the models, parameters are sharded already or not
            the same on all replicas, or the device is XLA.
    """
    sharded = FullySharded(
        shard_group_size=shard_group_size, reshard_after_forward=reshard_after_forward, offload=offload
    )
    sharded.finish(models, units)
    return sharded


def in_order_of_backward(trained: Sequence[Tensor]) -> list[FlatParameters]:
    """Return the buffers of sharded parameters among these, in the order in which backward fills them.

    Buffers that also hold other parameters, such as frozen ones, are split.
    """
    wanted = set(trained)
    owners = list(dict.fromkeys(it.owner for p in trained if isinstance(it := holder_of(p), _UnitParameters)))
    return [flat for owner in owners for flat in owner.only(wanted)]


@contextmanager
def hint_at_bypassed_outputs(backward: AbstractContextManager[None], parameters: Iterable[Tensor]) -> Iterator[None]:
    """The block `backward`, whose errors say what to do if backward has read sharded parameters that are given up."""
    try:
        with backward:
            yield
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error) and any(map(holder_of, parameters)):
            error.add_note(
                "The model's parameters are sharded (ZeRO-3), and are gathered when backward reaches the output of a "
                "unit. A loss that is not computed from what the units return, or a second derivative, needs "
                "reshard_after_forward=False, which keeps them until the step."
            )
        raise


# What outputs consist of, if torch knows their classes.
_KNOWN = (Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class _UnitParameters(FlatParameters):
    """The sharded parameters of a unit, or those outside the units."""

    def __init__(
        self, owner: "FullySharded", parameters: Sequence[Tensor], group: Group, near: Group | None, *, is_of_unit: bool
    ) -> None:
        super().__init__(parameters, group, is_released=True, near=near, offload=owner.offload)
        self.owner, self.is_of_unit = owner, is_of_unit
        self._done: Callable[[], None] | None = None

    def follow_unit(self, done: Callable[[], None]) -> bool:
        """Have `done` called when backward has left the unit; returns whether it will be called."""
        self._done = done
        return self.is_of_unit and self.owner.reshards

    def unit_is_done(self) -> None:
        """Say that backward has left the unit, after all of its calls in a forward."""
        if self._done is not None:
            self._done()


class FullySharded:
    """Gathers and releases the sharded parameters of models, by hooks on their units.

    `fully_shard` makes one of models in memory. A model that is filled unit by unit is never whole: `add` shards each
    unit as soon as it has values, and `finish` the rest.

    Args:
        shard_group_size: see `fully_shard`.
        reshard_after_forward: see `fully_shard`.
        offload: see `fully_shard`.

    Attributes:
        reshards: whether parameters are given up after each forward and backward, and not after the step.

    Raises:
        RuntimeError: there are several ranks but no mesh.
        ValueError: there are no groups of this size.
    """

    def __init__(
        self,
        *,
        shard_group_size: int | None = None,
        reshard_after_forward: bool | int = True,
        offload: bool = False,
    ) -> None:
        require_mesh()
        self.offload = offload
        self._placements = sharding_placements(active_group("dp", "cp"), shard_group_size)
        self.reshards = reshard_after_forward is not False
        dense, experts = self._placements
        near = of_experts = reshard_after_forward
        if not isinstance(near, bool):
            of_experts = min(near, experts.replicas.size)  # fewer ranks hold the same experts
        self._near = [_near_group(dense.replicas, near), _near_group(experts.replicas, of_experts)]
        self._flats: dict[nn.Module, list[_UnitParameters]] = {}  # by unit; outside the units by model
        self._models: dict[nn.Module, set[Tensor]] = {}
        self._used: dict[nn.Module, list[_UnitParameters]] = {}  # what `of` has found
        self._start = StartComparison()

    def add(self, unit: nn.Module, parameters: Iterable[Tensor]) -> None:
        """Shard parameters of a unit, which have values now. Nothing is sent, so ranks may take turns.

        Args:
            unit: the unit.
            parameters: some of its parameters that no other unit shares, in the same order on every replica.
        """
        its = list(parameters)
        self._start.add(its)
        self._flats.setdefault(unit, []).extend(self._make(its, is_of_unit=True))

    def finish(self, models: Sequence[nn.Module], units: Iterable[nn.Module]) -> None:
        """Shard what `add` has not, and gather parameters from now on when they are used; see `fully_shard`."""
        units = list(dict.fromkeys(units))
        _check_units(models, units)
        by_unit = parameters_by_unit(models, units)
        added = {p for flats in self._flats.values() for flat in flats for p in flat.parameters}
        rest = {module: [p for p in its if p not in added] for module, its in by_unit.items()}
        _check([p for its in rest.values() for p in its])
        for module, its in rest.items():
            self._start.add(its)
            self._flats.setdefault(module, [])
        self._start.check()
        self._flats = {
            module: [*self._flats[module], *self._make(its, is_of_unit=module not in models)]
            for module, its in rest.items()
        }
        self._models = {model: set(model.parameters()) for model in models}
        for model in models:
            _keep_replicas_in_step(model)
            order = [module for module in model.modules() if module in self._flats and module not in self._models]
            _ModelHooks(self, model, order)

    def of(self, module: nn.Module) -> list[_UnitParameters]:
        """Return the buffers of a unit, or those of a model's other parameters, which another model may share."""
        if module not in self._used:
            its = self._models.get(module)
            of_models = [flat for model in self._models for flat in self._flats[model]]
            self._used[module] = (
                self._flats[module] if its is None else [it for it in of_models if not its.isdisjoint(it.parameters)]
            )
        return self._used[module]

    def only(self, wanted: set[Tensor]) -> list[FlatParameters]:
        """Return the buffers that hold exactly these parameters, in the order of backward."""
        found: list[FlatParameters] = []
        self._used = {}
        for flats in self._flats.values():
            mixed = [it for it in flats if 0 < len(wanted.intersection(it.parameters)) < len(it.parameters)]
            for flat in mixed:
                flats.remove(flat)
                flats.extend(self._split(flat, wanted))
            found += [it for it in flats if it.parameters[0] in wanted]
        return found

    def _split(self, flat: _UnitParameters, wanted: set[Tensor]) -> list[_UnitParameters]:
        flat.wait()
        for parameter in flat.parameters:
            parameter.data = parameter.data.clone()
        parts = [[p for p in flat.parameters if (p in wanted) is chosen] for chosen in (True, False)]
        return [it for part in parts for it in self._make(part, is_of_unit=flat.is_of_unit)]

    def _make(self, parameters: Iterable[Tensor], *, is_of_unit: bool) -> list[_UnitParameters]:
        kinds: dict[tuple[Any, ...], list[Tensor]] = {}
        for parameter in parameters:
            kind = (parameter.dtype, parameter.device, is_expert(parameter), parameter.requires_grad)
            kinds.setdefault(kind, []).append(parameter)
        made = []
        for (_, _, of_experts, _), alike in kinds.items():
            index = -1 if of_experts else 0
            group, near = self._placements[index].replicas, self._near[index]
            made.append(_UnitParameters(self, alike, group, near, is_of_unit=is_of_unit))
        return made


class _ModelHooks:
    """Gathers what a model's forward and backward use, and releases what they have used.

    Args:
        sharded: the parameters.
        model: the model.
        units: its units, in the order of their forwards.
    """

    def __init__(self, sharded: FullySharded, model: nn.Module, units: Sequence[nn.Module]) -> None:
        self._sharded, self._model, self._units = sharded, model, list(units)
        self._index = {unit: index for index, unit in enumerate(units)}
        self._ends_backward = False
        self._calls: dict[nn.Module, set[object]] = {}  # of the last forward, by unit: calls without a backward yet
        model.register_state_dict_pre_hook(_before_state_dict)
        model.register_load_state_dict_pre_hook(_before_load_state_dict)
        model.register_forward_pre_hook(_in_eager_mode(self._before_model), prepend=True)
        model.register_forward_hook(_in_eager_mode(self._after_model))
        others = {id(p) for flat in sharded.of(model) for p in flat.parameters}
        for module in model.modules():
            if module in self._index:
                module.register_forward_pre_hook(_in_eager_mode(self._before_unit), prepend=True, with_kwargs=True)
                # First: the hook that ends a stage of a pipeline leaves by an exception.
                module.register_forward_hook(_in_eager_mode(self._after_unit), prepend=True)
            elif module is not model and any(id(p) in others for p in module.parameters(recurse=False)):
                module.register_forward_pre_hook(_in_eager_mode(self._before_other), prepend=True)

    def _before_model(self, model: nn.Module, args: Any) -> None:
        self._gather(model)
        if not _in_backward():
            self._ends_backward = False  # the last one may have failed
            self._calls = {}
            if self._units:
                self._gather(self._units[0])
        self._wait(model)

    def _before_other(self, module: nn.Module, args: Any) -> None:
        self._wait(self._model)

    def _after_model(self, model: nn.Module, args: Any, output: Any) -> None:
        comes_back = self._watch(model, output)
        if comes_back and not self._sharded.reshards:
            self._keep(model)
        elif comes_back is False:
            self._release(model)

    def _before_unit(self, unit: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._wait(unit)
        if _in_backward():  # it is computed again
            return None
        following = self._index[unit] + 1
        if following < len(self._units):
            self._gather(self._units[following])
        if not torch.is_grad_enabled() or not self._sharded.reshards:
            return None
        args, kwargs = _own_inputs(args), {name: _own_inputs(it) for name, it in kwargs.items()}
        calls, call = self._calls.setdefault(unit, set()), object()
        calls.add(call)
        for tensor in _that_need_gradients((args, kwargs)):
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(self._after_backward, unit, calls, call))
        return args, kwargs

    def _after_unit(self, unit: nn.Module, args: Any, output: Any) -> None:
        if _in_backward():
            return
        is_last = self._index[unit] == len(self._units) - 1
        comes_back = self._watch(unit, output)
        if comes_back is False:
            self._release(unit)
        elif comes_back and not self._sharded.reshards:
            self._keep(unit)
        elif comes_back and not is_last:  # backward begins with the last one
            self._release(unit, until_backward=True)

    def _watch(self, module: nn.Module, output: Any) -> bool | None:
        """Follow the backward through a module's output.

        Returns:
            Whether a backward may come. None if the parameters must stay: the output is an object of an unknown class,
            so that a backward would not be noticed, or it is part of them.
        """
        leaves = tree_leaves(output)
        needing = _that_need_gradients(leaves)
        for leaf in needing:
            # Not a hook on the tensor, which would run before those that tell that the module behind it is done.
            follow = leaf.register_hook if leaf.grad_fn is None else leaf.grad_fn.register_prehook
            follow(partial(self._before_backward, module))
        if torch.is_grad_enabled() and not all(isinstance(it, _KNOWN) for it in leaves):
            return None
        if any(flat.shares_memory(it) for flat in self._sharded.of(module) for it in leaves if isinstance(it, Tensor)):
            return None
        return bool(needing)

    def _before_backward(self, module: nn.Module, gradients: Any) -> None:
        begins = not self._ends_backward
        if begins:
            self._ends_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._wait(self._model)
        self._wait(module)
        # Backward may reach further outputs of the model late, such as features of images, and not on every rank.
        after_units = len(self._units) if begins else 0
        before = self._index.get(module, after_units) - 1
        if before >= 0:
            self._gather(self._units[before])

    def _after_backward(self, unit: nn.Module, calls: set[object], call: object, gradient: Any) -> None:
        """Give a unit up when backward takes a gradient out of it, to what was computed before the unit.

        torch runs what is ready in the reverse order of forward, so nothing that needs the unit is left, wherever else
        gradients go: to inputs that several units share, or that backward does not reach.

        Args:
            unit: the unit.
            calls: those of its calls in a forward that backward has not left.
            call: the one that it leaves.
            gradient: the gradient.
        """
        self._release(unit)
        if call in calls:
            calls.remove(call)
            if not calls:
                for flat in self._sharded.of(unit):
                    flat.unit_is_done()

    def _end_backward(self) -> None:
        self._ends_backward = False
        if self._sharded.reshards:
            for module in (*self._units, self._model):
                self._release(module)

    def _gather(self, module: nn.Module) -> None:
        for flat in self._sharded.of(module):
            flat.gather()

    def _wait(self, module: nn.Module) -> None:
        for flat in self._sharded.of(module):
            flat.wait()

    def _keep(self, module: nn.Module) -> None:
        for flat in self._sharded.of(module):
            flat.is_kept = True

    def _release(self, module: nn.Module, *, until_backward: bool = False) -> None:
        for flat in self._sharded.of(module):
            flat.release(until_backward=until_backward)


def _keep_replicas_in_step(model: nn.Module) -> None:
    """Have modules of transformers run on all ranks as long as one does, since every forward gathers.

    `generate` of replicas that stop at different lengths continues, and layers that are dropped at random are called.
    """
    for module in model.modules():
        if hasattr(module, "generate") or hasattr(module, "layerdrop"):
            module._is_fsdp_managed_module = True  # type: ignore[assignment]
            module._fsdp_use_orig_params = True  # type: ignore[assignment]  # or torch.compile would leave it out


def _before_state_dict(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:  # otherwise for the names of what it returns
        check_whole(model.parameters(), "state_dict()")


def _before_load_state_dict(model: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    if any(name.startswith(prefix) for name in state):  # otherwise it is for modules around the model
        check_whole(model.parameters(), "load_state_dict()")


def _in_eager_mode(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a hook out of the graphs that torch.compile records, which break at it."""
    # Called here and not a decorator, which would import the compiler along with this package.
    eager: Callable[..., Any] = torch.compiler.disable(hook)
    return eager


def _in_backward() -> bool:
    """Whether this is called by a backward, in which activation checkpointing computes modules again."""
    return torch._C._current_graph_task_id() != -1


def _own_inputs(value: Any) -> Any:
    """Return inputs of a unit in which tensors that need gradients are views of its own, in tuples as well.

    Backward passes such a view after this unit, and the tensor itself after all units that take it.
    """
    if isinstance(value, Tensor) and value.requires_grad:
        return value.view_as(value)
    return tuple(map(_own_inputs, value)) if type(value) is tuple else value


def _that_need_gradients(values: Any) -> list[Tensor]:
    return [it for it in tree_leaves(values) if isinstance(it, Tensor) and it.requires_grad]


def _check_units(models: Sequence[nn.Module], units: Sequence[nn.Module]) -> None:
    inside = {module for model in models for module in model.modules()}
    for unit in units:
        if unit not in inside:
            raise ValueError(f"units has a {type(unit).__name__} that is not in the models; pass modules of the models")


def _check(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        if parameter.is_meta:
            raise ValueError("parameters on the meta device cannot be sharded; materialize the model first")
        if is_lazy_device(parameter):
            raise ValueError(
                "parameters cannot be sharded on XLA, where tensors do not share memory; use ZeRO-1, which shards the "
                "optimizer's states"
            )
        if holder_of(parameter) is not None:
            raise ValueError("the parameters are sharded already; call fully_shard once for all parts of a model")


def _near_group(group: Group, reshard_after_forward: bool | int) -> Group | None:
    """Return the neighboring ranks that share parameters between forward and backward; None for all of the group."""
    if isinstance(reshard_after_forward, bool) or reshard_after_forward == group.size:
        return None
    number = reshard_after_forward
    if number < 1 or group.size % number:
        raise ValueError(
            f"reshard_after_forward={number} must be true, false, or a number that divides the {group.size} ranks that "
            "share parameters"
        )
    return neighbors(group, number)


def parameters_by_unit(models: Sequence[nn.Module], units: Sequence[nn.Module]) -> dict[nn.Module, list[Tensor]]:
    """Return the parameters that are gathered together, by unit in the reverse order of forwards, models last."""
    holders: dict[Tensor, set[nn.Module]] = {}
    for unit in units:
        for parameter in _own_parameters(unit, set(units)):
            holders.setdefault(parameter, set()).add(unit)
    elsewhere = {p for model in models for p in _own_parameters(model, set(units))}
    order = [module for model in models for module in model.modules() if module in set(units)]
    found: dict[nn.Module, list[Tensor]] = {unit: [] for unit in reversed(order)}
    for parameter, its in holders.items():
        if len(its) == 1 and parameter not in elsewhere:
            found[next(iter(its))].append(parameter)
    in_units = {parameter for parameters in found.values() for parameter in parameters}
    for model in models:
        found[model] = [p for p in model.parameters() if p not in in_units]
        in_units.update(found[model])
    return found


def _own_parameters(module: nn.Module, units: set[nn.Module]) -> Iterator[Tensor]:
    """Yield the parameters of a module that are not in units inside it."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if child not in units:
            yield from _own_parameters(child, units)
