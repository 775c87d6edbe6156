"""Stand-ins for the modules that other stages hold, so that the model's own forward can run on a stage.

A stage runs the whole model's forward. The modules before its layers run on NaN values, the stand-in of the layer
before its first one returns the values that the previous stage sent, and the forward ends after its last layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

OTHER_WAYS = "cut the model by a trace (tracer_cls='torch'), or write its stages by hand (stages=[...])"


class StageEnd(Exception):
    """Raised to end the model's forward after the stage's last layer."""


@dataclass
class StageForward:
    """One forward of a stage: its inputs and outputs.

    Attributes:
        received: output of the previous stage's last layer.
        recorded: outputs of the recorded modules of earlier stages, then of this one, in the order of the layers.
        leaving: output of this stage's last layer.
        is_active: whether the stage's forward is running; False while a checkpointed layer is recomputed.
        is_entered: whether the forward is past the layers of earlier stages.
        replayed: number of `recorded` outputs that have been returned in place of earlier stages' modules.
        called: layers of earlier stages that have been called.
    """

    received: Any = None
    recorded: list[Tensor] = field(default_factory=list)
    leaving: Any = None
    is_active: bool = False
    is_entered: bool = False
    replayed: int = 0
    called: set[nn.Module] = field(default_factory=set)

    def begin(self, received: Any, recorded: list[Tensor]) -> None:
        """Begin the stage's forward."""
        self.received, self.recorded, self.replayed = received, list(recorded), 0
        self.is_active, self.is_entered = True, False
        self.called = set()

    def end(self) -> None:
        """End the forward and release its tensors."""
        self.received = self.leaving = None
        self.recorded = []
        self.is_active = False


class AbsentLayer(nn.Module):
    """Stands in for a layer of an earlier or later stage; it has the layer's plain attributes.

    Layers of earlier stages return the received value, which the model takes for the output of the previous layer.
    With `ends_stage`, a layer of a later stage ends this one when the model has skipped the last layer of this stage.
    """

    def __init__(self, layer: nn.Module, run: StageForward, *, is_later: bool, ends_stage: bool = False) -> None:
        super().__init__()
        own = {name: value for name, value in vars(layer).items() if name not in vars(self)}
        self.__dict__.update({name: value for name, value in own.items() if not isinstance(value, Tensor | nn.Module)})
        self._run = run
        self._is_later = is_later
        self._ends_stage = ends_stage
        self._replays: list[nn.Module] = []

    def add_replay(self, path: str, module: nn.Module) -> None:
        """Make the layer call a submodule, so that hooks on it see its output."""
        *parents, name = path.split(".")
        parent: nn.Module = self
        for part in parents:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
        parent.add_module(name, module)
        self._replays.append(module)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"the model reads {name!r} of a layer on another stage, which is not available here; {OTHER_WAYS}"
            ) from None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the last layer of the previous stage.

        Raises:
            RuntimeError: the layer belongs to a later stage, or the model calls it twice.
            StageEnd: it is the end of this stage.
        """
        if self._ends_stage:
            self._run.leaving = args[0] if args else kwargs["hidden_states"]
            raise StageEnd
        if self._is_later:
            raise RuntimeError(
                f"the model calls a layer of a later stage before the layers of this stage; {OTHER_WAYS}"
            )
        if self in self._run.called:
            raise RuntimeError(
                "the model calls a layer twice in one forward, so its stages do not form a sequence; put all "
                f"layers of its loop on the last stage, or {OTHER_WAYS}"
            )
        self._run.called.add(self)
        for replay in self._replays:
            replay()
        self._run.is_entered = True
        return self._run.received


class AbsentModule(nn.Module):
    """Stands in for an embedding or a head that another stage holds."""

    def __init__(self, name: str, module: nn.Module, run: StageForward) -> None:
        super().__init__()
        self._name = name
        self._run = run
        for size in ("embedding_dim", "out_features"):
            if isinstance(getattr(module, size, None), int):
                self.__dict__[size] = getattr(module, size)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return NaN in the shape of the module's output; the stage's layers detect values that depend on it.

        Raises:
            RuntimeError: the module is called where its values matter.
        """
        given = next(tensors_in((args, kwargs)), None)
        like = self._like()
        if given is None or like is None:
            raise RuntimeError(f"this stage calls {self._name!r}, which is on another stage; {OTHER_WAYS}")
        shape = tuple(given.shape)
        if "embedding_dim" in self.__dict__:
            shape = (*shape, self.__dict__["embedding_dim"])
        elif "out_features" in self.__dict__:
            shape = (*shape[:-1], self.__dict__["out_features"])
        return torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            like = self._like() if name == "weight" else None
            if like is not None:
                return like.new_empty(0)  # models ask for its device or dtype
            raise AttributeError(
                f"this stage uses {name!r} of {self._name!r}, which is on another stage; {OTHER_WAYS}"
            ) from None

    def _like(self) -> Tensor | None:
        """Return a tensor of the model's dtype and device, as long as the stage's layers have not begun."""
        if self._run.is_entered:
            return None
        return next((it for it in tensors_in(self._run.received) if it.is_floating_point()), None)


def replay_of(module: nn.Module, run: StageForward) -> nn.Module:
    """Return a module of the same class without tensors, which returns the module's output on its own stage."""
    replay = shallow_copy(module)
    replay._parameters, replay._buffers, replay._modules = {}, {}, {}

    def forward() -> Tensor:
        run.replayed += 1
        return run.recorded[run.replayed - 1]

    replay.forward = forward
    return replay


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return a module with the same class, children, parameters and attributes, whose registries may be changed."""
    copy = module.__new__(type(module))
    registries = {name: value.copy() for name, value in vars(module).items() if isinstance(value, dict | set)}
    copy.__dict__.update({**vars(module), **registries})
    return copy


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a structure."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
