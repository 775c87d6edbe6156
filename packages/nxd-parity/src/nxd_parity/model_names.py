"""The modules that a program calls, and the names of their modules and parameters."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from nxd_parity.names import plain_name

MODEL = "model-"  # in front of names that another model has, too, with a number from 2


def is_model(name: str) -> bool:
    """Whether a plain name is that of a whole model."""
    return not name or (name.startswith(MODEL) and name.removeprefix(MODEL).isdecimal())


def model_of(name: str) -> str:
    """Return the plain name of the whole model that a module is in."""
    first = name.partition(".")[0]
    return first if is_model(first) else ""


class Part(NamedTuple):
    """A module or a parameter.

    Attributes:
        name: its plain name; the model itself has an empty one.
        model: which of the called models it is in, from 0.
    """

    name: str
    model: int = 0


class ModelNames:
    """Names of all modules and parameters of the models that were called.

    A model is a module that was called outside all others. Those without parameters, such as a loss, are known by
    their class. Of a wrapper and the module in it, which have one name, the inner one has it. Of two models with
    parameters of one name, such as an encoder and a decoder that are called by themselves, the second one's names begin
    with "model-2.".
    """

    def __init__(
        self,
        rename: Callable[[str], str] | None = None,
        modules_of: Callable[[nn.Module], Iterable[tuple[str, nn.Module]]] | None = None,
    ) -> None:
        """Start with no model.

        Args:
            rename: changes a plain name to the one that the other recording has, such as a pipeline stage's.
            modules_of: gives a model's modules with their names; by default all.
        """
        self._rename = rename or (lambda name: name)
        self._modules_of = modules_of or (lambda model: model.named_modules())
        self._modules: dict[int, Part] = {}
        self._parameters: dict[int, Part] = {}
        self._wrappers: set[int] = set()
        self._taken: set[str] = set()  # names of parameters
        self._alike = 1  # models that share names
        self._models: list[nn.Module] = []  # keeps ids from being used again

    def add(self, model: nn.Module) -> bool:
        """Add a model that is called; returns whether it is new."""
        if id(model) in self._modules:
            return False
        number = len(self._models)
        self._models.append(model)
        has_parameters = next(model.parameters(), None) is not None
        holders: dict[str, nn.Module] = {}
        parameters = {self._rename(plain_name(name)): it for name, it in model.named_parameters()}
        new = {name for name, it in parameters.items() if id(it) not in self._parameters}
        prefix = ""
        if new & self._taken:
            self._alike += 1
            prefix = f"{MODEL}{self._alike}."
        for name, module in self._modules_of(model):
            plain = prefix + self._rename(plain_name(name)) if has_parameters else f"{type(model).__name__}.{name}"
            plain = plain.rstrip(".")
            self._modules.setdefault(id(module), Part(plain, number))
            if plain in holders:
                self._wrappers.add(id(holders[plain]))
            holders[plain] = module
        for name, parameter in parameters.items():
            self._parameters.setdefault(id(parameter), Part(prefix + name, number))
        self._taken |= {prefix + name for name in new}
        return True

    def of_call(self, module: nn.Module, *, is_whole: bool) -> Part | None:
        """Return which module was called; None if it is in no model, or wraps another inside a model."""
        return self._modules.get(id(module)) if is_whole or id(module) not in self._wrappers else None

    def is_recorded(self, module: nn.Module) -> bool:
        """Whether a module's outputs are recorded: those of wrappers are those of the module in them."""
        return id(module) not in self._wrappers

    def of_parameter(self, parameter: Tensor) -> Part | None:
        """Return which parameter a tensor is; None if it is not in a model."""
        return self._parameters.get(id(parameter))

    def parameters(self, models: Mapping[int, nn.Module]) -> Iterator[tuple[Part, Tensor]]:
        """Yield the parameters of models, each once."""
        seen: set[int] = set()
        for model in models.values():
            for parameter in model.parameters():
                part = self._parameters.get(id(parameter))
                if part is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield part, parameter
