"""Hooks on everything that a training step does: modules, backward, clipping and optimizers.

They are torch's hooks for all modules and all optimizers, so that a program need not be changed; only the functions
that have no hooks, `torch.autograd.backward` and those that clip gradients, are wrapped. Each module gets a hook of its
own for its output when it is first called, because those for all modules run before hooks that change the output.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_modules
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from nxd_parity import events
from nxd_parity.events import Placement
from nxd_parity.model_names import ModelNames, Part
from nxd_parity.noise import Noise
from nxd_parity.replaced import replaced
from nxd_parity.writer import RankWriter


@dataclass
class Progress:
    """Where the program is; shared by everything that records.

    Attributes:
        step: the number of the optimizer step under way, from 1.
        is_stepped: whether an optimizer has made this step; the next call of a model begins another.
        module: the innermost module that runs, if one does.
        is_in_module: whether one does.
        in_backward: the module whose output got its gradient last.
        is_over: whether all steps that are to be recorded are.
    """

    step: int = 1
    is_stepped: bool = False
    module: str = ""
    is_in_module: bool = False
    in_backward: str = ""
    is_over: bool = False


@dataclass
class _Call:
    """A call of a module that has not returned.

    Attributes:
        module: the module.
        order: when it began.
        versions: torch's counts of changes in place of the inputs at that time, by identity.
        sources: the modules that positional inputs are outputs of, before the module's own hooks change them.
        around: the module that called this one, if one did.
        is_probe: whether its values are thrown away, as those by which a pipeline learns the shapes of its messages.
    """

    module: nn.Module
    order: int
    versions: dict[int, int]
    sources: tuple[str, ...] = ()
    around: str = ""
    is_probe: bool = False


class _LastHook:
    """A hook of a module that runs after those it had, which may change its output. Copies of the module do without."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *given: Any) -> Any:
        return self._hook(*given)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _hook_of_copy, ()


def _hook_of_copy() -> Callable[..., None]:
    """Return what copies and pickles of a module that is recorded have instead."""
    return _do_nothing


def _do_nothing(*given: Any) -> None:
    pass


class StepHooks:
    """Records the tensors of a program's steps, between `installed` and its end."""

    def __init__(
        self,
        writer: RankWriter,
        names: ModelNames,
        progress: Progress,
        noise: Noise | None,
        at_end_of_step: Callable[[], None] = lambda: None,
        *,
        by_hand: bool = False,
    ) -> None:
        """Prepare; nothing is hooked yet. `at_end_of_step` may remove the hooks. For `by_hand`, see `record`."""
        self._writer, self._names, self._progress, self._noise = writer, names, progress, noise
        self._under_way: list[_Call] = []
        self._called: dict[int, nn.Module] = {}  # the models that were called in this step
        self._order = 0
        self._calls: dict[tuple[int, str], int] = {}
        self._made_by = WeakIdKeyDictionary()  # the module that a tensor is the output of
        self._hooked = WeakIdKeyDictionary()  # modules that have a hook of ours
        self._has_gradients = False
        self._model_call = -1
        self._at_end_of_step = at_end_of_step
        self._is_installed = False
        self._by_hand = by_hand

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hook into torch inside the `with` block."""
        with ExitStack() as stack:
            stack.callback(of_modules.register_module_forward_pre_hook(self._before_forward).remove)
            if not self._by_hand:
                self._install_for_steps(stack)
            self._is_installed = True
            stack.callback(setattr, self, "_is_installed", False)
            stack.callback(self._unhook)
            yield

    def _install_for_steps(self, stack: ExitStack) -> None:
        """Hook into what a program does with losses and gradients, until the stack is closed."""
        for handle in (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            stack.callback(handle.remove)
        places = {
            (torch.autograd, "backward"): self._backward,
            (torch.nn.utils, "clip_grads_with_norm_"): self._clip_with_norm,
            (torch.nn.utils, "clip_grad_norm_"): self._clip,
            (torch.nn.utils.clip_grad, "clip_grad_norm_"): self._clip,
        }
        wrappers = {at: _wrapped(getattr(*at), it) for at, it in places.items()}
        stack.enter_context(replaced(wrappers))

    def tensor(self, kind: str, name: str, value: Tensor, part: int, placement: Placement | None) -> None:
        """Record a tensor that the program gives; see `Recorder.tensor`."""
        is_of_last_step = kind in (events.PARAMETER, events.OPTIMIZER_STATE)
        step = self._progress.step - 1 if is_of_last_step else self._progress.step
        self._record(kind, Part(name), value, part, 0, step=step, placement=placement)

    def step_is_done(self) -> None:
        """End the step of a program that says so."""
        self._progress.is_stepped = True
        self.end_step()

    @property
    def lacks_steps(self) -> bool:
        """Whether a loss was differentiated, and no optimizer of torch has stepped."""
        return self._progress.step == 1 and (1, "a loss") in self._calls

    def end_step(self) -> None:
        """Record the parameters if an optimizer has stepped, and begin the next step."""
        if not self._progress.is_stepped:
            return
        if not self._by_hand:
            self._record_parameters(self._progress.step, self._names.parameters(self._called))
        self._called.clear()
        self._writer.flush()
        self._progress.step += 1
        self._progress.is_stepped = self._has_gradients = False
        self._model_call = -1
        self._at_end_of_step()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or is_in_backward():
            return
        if module not in self._hooked:  # hooks for all modules would come before the module's own
            hook = _LastHook(self._after_forward)
            self._hooked[module] = module.register_forward_hook(hook, with_kwargs=True, always_call=True)
        is_probe = self._under_way[-1].is_probe if self._under_way else _is_probe()
        if is_probe:
            self._under_way.append(_Call(module, self._order, {}, is_probe=is_probe))
            return
        if not self._under_way:
            self.end_step()
            if not self._is_installed:
                return
            self._model_call += 1
            self._called[id(module)] = module
            if self._names.add(module) and not self._by_hand:
                self._record_parameters(self._progress.step - 1, self._names.parameters({id(module): module}))
        self._order += 1
        given = list(_tensors_in(inputs))
        versions = {id(it): it._version for it in given}
        self._under_way.append(_Call(module, self._order, versions, self._sources(given), self._progress.module))
        part = self._names.of_call(module, is_whole=len(self._under_way) == 1)
        self._progress.module = self._progress.module if part is None else part.name
        self._progress.is_in_module = True

    def _after_forward(self, module: nn.Module, inputs: Any, named_inputs: Any = None, output: Any = None) -> Any:
        if torch.compiler.is_compiling() or is_in_backward():
            return None
        if not self._under_way or self._under_way[-1].module is not module:
            return None
        begun = self._under_way.pop()
        if not begun.is_probe:
            self._progress.module, self._progress.is_in_module = begun.around, bool(self._under_way)
        if begun.is_probe or output is None:  # the module has raised; torch leaves out some of the arguments then
            return None
        part = self._names.of_call(module, is_whole=not self._under_way)
        if part is None:
            return None
        is_recorded = self._names.is_recorded(module)
        call = self._count(part.name) if is_recorded else self._model_call
        given = [*_tensors_in(inputs), *_tensors_in(named_inputs)]
        sources = tuple(dict.fromkeys((*begun.sources, *self._sources(given))))
        for index, tensor in enumerate(given):
            is_unchanged = begun.versions.get(id(tensor), tensor._version) == tensor._version
            if is_unchanged and (not self._under_way or (tensor.is_floating_point() and tensor not in self._made_by)):
                self._record(events.INPUT, part, tensor, call, index, order=begun.order)
        if not is_recorded:
            return None
        if self._noise is not None and not any(module.children()):
            output = self._noise.added_to(output)
        for index, tensor in enumerate(it for it in _tensors_in(output) if it.is_floating_point()):
            self._record(events.ACTIVATION, part, tensor, call, index, inputs=sources)
            self._made_by[tensor] = part.name
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_hook(part, call, index))
        return output if self._noise is not None else None

    def _sources(self, given: Sequence[Tensor]) -> tuple[str, ...]:
        """Return the modules that tensors are outputs of."""
        return tuple(dict.fromkeys(self._made_by[it] for it in given if it in self._made_by))

    def _unhook(self) -> None:
        for handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()

    def _count(self, name: str) -> int:
        """Return how many calls of a name there were in this step, and count one more."""
        call = self._calls.get((self._progress.step, name), 0)
        self._calls[self._progress.step, name] = call + 1
        return call

    def _gradient_hook(self, part: Part, call: int, index: int) -> Callable[[Tensor], None]:
        step, model_call = self._progress.step, self._model_call

        def hook(gradient: Tensor) -> None:
            if gradient is not None:
                self._progress.in_backward = part.name
                self._record(events.ACTIVATION_GRADIENT, part, gradient, call, index, step=step, model_call=model_call)

        return hook

    def _backward(self, original: Callable[..., Any], tensors: Any, *others: Any, **named: Any) -> Any:
        self._progress.in_backward = ""
        roots = list(_tensors_in(tensors))
        if len(roots) == 1 and roots[0].numel() == 1:
            self._record(events.LOSS, Part(""), roots[0], self._count("a loss"), 0)
        return original(tensors, *others, **named)

    def _clip(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        self._record_gradients()
        norm = original(*given, **named)
        if isinstance(norm, Tensor):
            self._record(events.GRADIENT_NORM, Part(""), norm, 0, 0)
        return norm

    def _clip_with_norm(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        self._record_gradients()
        norm = named.get("total_norm", given[2] if len(given) > 2 else None)
        if isinstance(norm, Tensor):
            self._record(events.GRADIENT_NORM, Part(""), norm, 0, 0)
        return original(*given, **named)

    def _before_step(self, optimizer: Optimizer, given: Any, named: Any) -> Any:
        """Record gradients; those that the step's closure computes are there once it has been called."""
        closure = named.get("closure", given[1] if len(given) > 1 else None)
        if not callable(closure):
            self._record_gradients()
            return None

        @wraps(closure)
        def recorded() -> Any:
            loss = closure()
            self._record_gradients()
            return loss

        return given[:1] + given[2:], {**named, "closure": recorded}

    def _after_step(self, optimizer: Optimizer, given: Any, named: Any) -> None:
        self._progress.is_stepped = True
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                part = self._names.of_parameter(parameter) or Part(f"optimizer.{number}.{index}")
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor) and value.is_floating_point():
                        self._record(events.OPTIMIZER_STATE, Part(f"{part.name}/{key}", part.model), value, 0, 0)

    def _record_gradients(self) -> None:
        """Record gradients once in a step: before they are clipped, if they are."""
        if self._has_gradients or self._progress.is_stepped:
            return
        self._has_gradients = True
        for part, parameter in self._names.parameters(self._called):
            if parameter.grad is not None:
                self._record(events.GRADIENT, part, parameter.grad, 0, 0)

    def _record_parameters(self, step: int, parameters: Any) -> None:
        for part, parameter in parameters:
            self._record(events.PARAMETER, part, parameter, 0, 0, step=step)

    def _record(
        self,
        kind: str,
        part: Part,
        value: Tensor,
        call: int,
        output: int,
        *,
        step: int | None = None,
        model_call: int | None = None,
        order: int | None = None,
        inputs: tuple[str, ...] = (),
        placement: Placement | None = None,
    ) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            local, found = _local_part(value)
        if local.is_meta or local.is_complex() or local.layout != torch.strided:
            return
        self._order += 1
        self._writer.tensor(
            self._progress.step if step is None else step,
            kind,
            part.name,
            local,
            call=call,
            output=output,
            model_call=max(self._model_call if model_call is None else model_call, 0),
            model=part.model,
            order=self._order if order is None else order,
            placement=placement or found,
            inputs=inputs,
        )


def _local_part(value: Tensor) -> tuple[Tensor, Placement | None]:
    """Return `local_part`, without loading torch's DTensors where a program has none: that takes seconds."""
    if "torch.distributed.tensor" not in sys.modules:
        return value.detach(), None
    from nxd_parity.placement import local_part  # noqa: PLC0415

    return local_part(value)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested containers, in order; models' outputs are mappings or dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name, None))


def is_in_backward() -> bool:
    """Whether backward is running: activation checkpoints call modules again there, with equal results."""
    return torch._C._current_graph_task_id() != -1


def _is_probe() -> bool:
    """Whether `torch.distributed.pipelining` calls a stage with made-up values, to learn the shapes of its outputs."""
    stage = sys.modules.get("torch.distributed.pipelining.stage")
    if stage is None:
        return False
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_prepare_forward_infra" and frame.f_code.co_filename == stage.__file__:
            return True
    return False


def _wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*given: Any, **named: Any) -> Any:
        return wrapper(original, *given, **named)

    return call
