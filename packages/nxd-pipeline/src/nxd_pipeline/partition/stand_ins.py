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
    """Raised to leave the model's forward after the stage's last layer."""


@dataclass
class Passage:
    """One forward of a stage: its inputs and outputs.

    Attributes:
        received: output of the previous stage's last layer.
        recorded: outputs of the recorded modules of earlier stages, then of this one, in the order of the layers.
        leaving: output of this stage's last layer.
        is_active: whether the stage's forward is running; it is not when a checkpointed layer is computed again.
        is_entered: whether the layers of earlier stages are behind.
        replayed: number of `recorded` outputs that have been returned in place of earlier stages' modules.
        passed: layers of earlier stages that are behind.
    """

    received: Any = None
    recorded: list[Tensor] = field(default_factory=list)
    leaving: Any = None
    is_active: bool = False
    is_entered: bool = False
    replayed: int = 0
    passed: set[nn.Module] = field(default_factory=set)

    def begin(self, received: Any, recorded: list[Tensor]) -> None:
        """The stage's forward begins."""
        self.received, self.recorded, self.replayed = received, list(recorded), 0
        self.is_active, self.is_entered = True, False
        self.passed = set()

    def end(self) -> None:
        """The stage's forward is over, and nothing of it is kept."""
        self.received = self.leaving = None
        self.recorded = []
        self.is_active = False


class AbsentLayer(nn.Module):
    """Stands in for a layer of an earlier or later stage; it has the layer's plain attributes.

    Earlier layers return what was received, so the model takes it for the output of the layer before the stage's own.
    """

    def __init__(self, layer: nn.Module, passage: Passage, *, is_behind: bool) -> None:
        super().__init__()
        own = {name: value for name, value in vars(layer).items() if name not in vars(self)}
        self.__dict__.update({name: value for name, value in own.items() if not isinstance(value, Tensor | nn.Module)})
        self._passage = passage
        self._is_behind = is_behind
        self._replays: list[nn.Module] = []

    def add_replay(self, path: str, module: nn.Module) -> None:
        """Have the layer call a module below it, for those who listen there."""
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
        """The output of the last layer of the previous stage.

        Raises:
            RuntimeError: the layer is behind the stage's own, or the model loops over it.
        """
        if self._is_behind:
            raise RuntimeError(
                f"the model calls a layer of a later stage before the layers of this stage; {OTHER_WAYS}"
            )
        if self in self._passage.passed:
            raise RuntimeError(
                "the model calls a layer twice in one forward, so its stages do not form a sequence; put all "
                f"layers of its loop on the last stage, or {OTHER_WAYS}"
            )
        self._passage.passed.add(self)
        for replay in self._replays:
            replay()
        self._passage.is_entered = True
        return self._passage.received


class AbsentModule(nn.Module):
    """Stands in for an embedding or a head that another stage holds."""

    def __init__(self, name: str, module: nn.Module, passage: Passage) -> None:
        super().__init__()
        self._name = name
        self._passage = passage
        for size in ("embedding_dim", "out_features"):
            if isinstance(getattr(module, size, None), int):
                self.__dict__[size] = getattr(module, size)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Of the shape that the module returns, `nan` everywhere: what depends on it is caught at the layers.

        Raises:
            RuntimeError: it is called where its values matter.
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
        """A tensor of the model's dtype and device, while the model is before its layers."""
        if self._passage.is_entered:
            return None
        return next((it for it in tensors_in(self._passage.received) if it.is_floating_point()), None)


def replay_of(module: nn.Module, passage: Passage) -> nn.Module:
    """A module of the same class without tensors, which returns what that one has returned on its own stage."""
    replay = shallow_copy(module)
    replay._parameters, replay._buffers, replay._modules = {}, {}, {}

    def forward() -> Tensor:
        passage.replayed += 1
        return passage.recorded[passage.replayed - 1]

    replay.forward = forward
    return replay


def shallow_copy(module: nn.Module) -> nn.Module:
    """A module of the same class, children, parameters and attributes, whose own registries may be changed."""
    copy = module.__new__(type(module))
    registries = {name: value.copy() for name, value in vars(module).items() if isinstance(value, dict | set)}
    copy.__dict__.update({**vars(module), **registries})
    return copy


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a structure."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
