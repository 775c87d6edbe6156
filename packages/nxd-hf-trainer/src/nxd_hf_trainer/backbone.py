"""What a pipeline's stages run of a model of transformers: its backbone. The rest, its head, every rank runs itself.

So a script's losses and forwards, which may use the head's weight in ways of their own, work as in one process: only
the call of the backbone is answered by the stages. The head's parameters belong to the last stage; the other ranks have
copies, whose gradients the last stage's training step takes over.
"""

import copy
import functools
import inspect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from nxd_pipeline import current_microbatch
from nxd_state import broadcast, get_device, get_group, is_multimodal
from torch import Tensor, nn

GRADIENTS = "output_gradients"  # the input of the second pass
_OF_GENERATION = ("past_key_values", "cache", "cache_position", "use_cache")
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


class _HeadParameter(NamedTuple):
    """A parameter of the head: the path of its module, its name there, and its copy, which a script's loss uses."""

    path: str
    name: str
    copy: nn.Parameter


class OutputForm(NamedTuple):
    """What the backbone's output is without its tensors: the class, and how many tensors each field has.

    None means that the field is a tensor, not a tuple of tensors.
    """

    kind: type
    fields: dict[str, int | None]

    def filled(self, tensors: Iterable[Tensor]) -> Any:
        """Return an output with these tensors, in the order of the fields."""
        rest = iter(tensors)
        return self.kind(
            **{name: next(rest) if count is None else tuple(islice(rest, count)) for name, count in self.fields.items()}
        )


def _taken_apart(output: Any) -> tuple[OutputForm, list[Tensor]]:
    """Return the form of a backbone's output and its tensors; other fields, such as a cache, are left out.

    Raises:
        ValueError: a tensor has no rows, so that those of microbatches cannot be put together.
    """
    fields: dict[str, int | None] = {}
    tensors: list[Tensor] = []
    for name, value in output.items():
        parts = [value] if isinstance(value, Tensor) else value
        if not isinstance(parts, (list, tuple)) or not all(isinstance(it, Tensor) for it in parts):
            continue
        if any(not it.dim() for it in parts):
            raise ValueError(
                f"the backbone returns {name}, one number for a batch, which is not that of its microbatches; use one "
                "pipeline stage"
            )
        fields[name] = None if isinstance(value, Tensor) else len(parts)
        tensors += parts
    return OutputForm(type(output), fields), tensors


class BackboneStages:
    """Makes the stages of a model those of its backbone, and keeps the head's copies equal to the last stage's.

    Args:
        whole: a model of transformers, with its layers split, before it is cut.

    Attributes:
        input_names: the inputs that the stages take.
        returns_routers: whether the stages return logits of routers, as the config asks.
    """

    def __init__(self, whole: Any) -> None:
        named = inspect.signature(whole.base_model.forward).parameters.values()
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        taken = [it.name for it in named if it.kind not in kinds]
        self.input_names = [
            *(it for it in taken if not it.startswith("output_") and it not in _OF_GENERATION),
            GRADIENTS,
        ]
        self.returns_routers = bool(getattr(whole.config, "output_router_logits", False))
        self._head: list[_HeadParameter] = []
        self._head_gradients: list[Tensor | None] = []
        self._is_changed = True

    @contextmanager
    def cut(self, whole: Any) -> Iterator[None]:
        """Context in which stages that are cut from the model run its backbone, without the hooks of the model itself.

        The last stage returns the tensors of the backbone's output, and its form; or, with the gradients of these
        tensors, the sum of both's products as its loss, with that of the head's parameters and their gradients.
        """
        kind = type(whole)
        kept = {name: vars(whole)[name] for name in (*_HOOKS, "forward") if name in vars(whole)}
        vars(whole).pop("forward", None)
        vars(whole).update({name: OrderedDict() for name in _HOOKS})
        # The class: stages are copies of the model, and call their own forward.
        members = {"forward": self._forward(type(whole.base_model).forward), "__module__": kind.__module__}
        whole.__class__ = type(kind.__name__, (kind,), members)
        head = {name: child for name, child in whole.named_children() if child is not whole.base_model}
        whole._modules.update({name: _with_same_tensors(child) for name, child in head.items()})
        try:
            yield
        finally:
            whole.__class__ = kind
            vars(whole).update(kept)
            whole._modules.update(head)
        vars(whole.base_model).update({name: OrderedDict() for name in _HOOKS})  # the stages have them
        self._take_copies(head)

    def _take_copies(self, head: Mapping[str, nn.Module]) -> None:
        """Give the head of the script's model copies of its parameters."""
        made: dict[Tensor, nn.Parameter] = {}  # a weight may have two names
        for child, module in head.items():
            for path, part in module.named_modules():
                for name, parameter in list(part.named_parameters(recurse=False)):
                    own = made.setdefault(parameter, _copied(parameter))
                    part._parameters[name] = own
                    self._head.append(_HeadParameter(f"{child}.{path}".rstrip("."), name, own))

    def free_other_stages(self, whole: nn.Module, own: Iterable[nn.Parameter]) -> None:
        """Free the parameters of a model that other ranks hold; placeholders of their shape, without memory, remain.

        Layers that have them raise an error if a script calls them.

        Args:
            whole: the model that was cut.
            own: the parameters of this rank's stages.
        """
        kept = {*own, *(it.copy for it in self._head)}
        made: dict[Tensor, nn.Parameter] = {}
        for module in whole.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter not in kept:
                    value = torch.zeros((), dtype=parameter.dtype, device=get_device()).expand(parameter.shape)
                    empty = nn.Parameter(value, requires_grad=parameter.requires_grad)
                    module._parameters[name] = made.setdefault(parameter, empty)
                    vars(module)["forward"] = functools.partial(_absent, type(module).__name__)

    def _forward(self, of_backbone: Any) -> Any:
        @functools.wraps(of_backbone)  # stages are checked by its signature
        def forward(stage: Any, output_gradients: list[Tensor | None] | None = None, **inputs: Any) -> dict[str, Any]:
            inputs = {name: it for name, it in inputs.items() if it is not None}  # PEFT passes on what it knows
            if self.returns_routers:
                inputs["output_router_logits"] = True
            output = stage.base_model(**inputs)
            form, outputs = _taken_apart(output)
            head = [getattr(stage.get_submodule(it.path), it.name) for it in self._head]
            if output_gradients is None:
                if current_microbatch() == 0:  # the others have the same head
                    self._update(head)
                return {"form": form, "outputs": outputs}
            pairs = zip((*outputs, *head), (*output_gradients, *self._head_gradients), strict=True)
            return {"loss": sum((it * its).sum() for it, its in pairs if its is not None)}

        return forward

    def _update(self, head: Iterable[Tensor]) -> None:
        """Set the copies on the last stage's rank, which is the first to know of changes."""
        for it, value in zip(self._head, head, strict=True):
            if not torch.equal(it.copy, value):
                self._is_changed = True
                it.copy.copy_(value)

    def head_is_changed(self) -> bool:
        """Whether the copies on this rank have changed since they were shared."""
        return self._is_changed

    def share_head(self) -> None:
        """Send the last stage's parameters to all ranks. Called by all ranks of the pipeline."""
        pipeline = get_group("pp")
        with torch.no_grad():
            for own in dict.fromkeys(it.copy for it in self._head):
                own.copy_(broadcast(own.detach(), pipeline, source=pipeline.size - 1))
        self._is_changed = False

    def head_has_gradients(self) -> bool:
        """Whether a backward has reached the head's copies."""
        return any(it.copy.grad is not None for it in self._head)

    def take_head_gradients(self) -> None:
        """Let the next training step of the last stage add the gradients of the copies to its parameters."""
        seen: set[Tensor] = set()
        self._head_gradients = []
        for it in self._head:
            self._head_gradients.append(None if it.copy in seen else it.copy.grad)
            seen.add(it.copy)
        for own in seen:
            own.grad = None


def called_as_backbone(whole: Any) -> list[nn.Module]:
    """Return the modules whose calls the stages answer: the backbone, and a decoder inside that is all it has (OPT)."""
    decoder = whole.get_decoder() if hasattr(whole, "get_decoder") and not is_multimodal(whole) else None
    return [whole.base_model, *([] if decoder in (None, whole, whole.base_model) else [decoder])]


def _with_same_tensors(module: nn.Module) -> nn.Module:
    """Return a copy of a module that has the same parameters and buffers."""
    shared = {id(it): it for it in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, shared)


def _absent(kind: str, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"this {kind} is on another rank of the pipeline; call the model or its backbone (base_model), whose stages "
        "run together, or use one pipeline stage"
    )


def _copied(parameter: nn.Parameter) -> nn.Parameter:
    values = parameter.detach().to(get_device(), copy=True)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)
