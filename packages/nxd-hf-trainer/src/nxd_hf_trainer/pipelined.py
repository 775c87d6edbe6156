"""A model that is cut into pipeline stages, called as if it were whole: `accelerator.backward(model(**inputs).loss)`.

A script computes its loss from the model's outputs, and calls backward on it. So the stages run twice. The first pass,
without gradients, gives the outputs of the backbone to every rank of the pipeline, where the head and the script's loss
follow. Backward gives the gradients of these outputs. The second pass, which `Accelerator.backward` runs, is a training
step of the pipeline with the same random numbers, and the sum of outputs times gradients as its loss: the gradients of
the parameters are then those of the script's loss. One forward more is computed, as with activation checkpointing of
the whole model (Chen et al. 2016).
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from nxd_engine import NxDModel
from nxd_pipeline import Microbatches
from nxd_state import all_gather_object, broadcast, get_device, get_group, get_rng_state, set_rng_state
from torch import Tensor

from nxd_hf_trainer.backbone import GRADIENTS, BackboneStages, OutputForm

_OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch")  # the model's forward hands on what it does not know
_NOT_PASSED_ON = (*_OF_THE_LOSS, "use_cache", "cache_position", "return_dict", "output_router_logits")
_REFUSED = ("past_key_values", "cache", "output_attentions", "output_hidden_states")


@dataclass(eq=False)
class _FirstPass:
    """What the second pass repeats: inputs, their number of rows, random state and autocast.

    Attributes:
        number: counts the first passes, equally on all ranks.
        gradients: of the outputs, those that backward has given since the last second pass.
    """

    inputs: Mapping[str, Any]
    rows: int
    random_state: Any
    autocast: torch.autocast
    number: int
    gradients: list[Tensor | None] = field(default_factory=list)


class _Outputs(torch.autograd.Function):
    """Gives the outputs of a first pass to the script. Each backward that reaches them leaves their gradients there.

    The graph keeps the first pass: it is freed with a loss that is dropped, and repeated for each backward of one.
    """

    @staticmethod
    def forward(
        ctx: Any, first: _FirstPass, ready: dict[int, _FirstPass], anchor: Tensor, *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the outputs; the anchor is a tensor without elements that requires gradients."""
        ctx.first, ctx.ready = first, ready
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(it for it in outputs if not it.is_floating_point()))
        return tuple(it.clone() for it in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        """Add the gradients to those of the first pass, which then waits for its second one."""
        first = ctx.first
        before = first.gradients or [None] * len(gradients)
        first.gradients = [
            it if its is None else its if it is None else it + its for it, its in zip(before, gradients, strict=True)
        ]
        ctx.ready[first.number] = first
        return (None, None, None, *(None for _ in gradients))


class PipelinedForward:
    """The `forward` of a model whose stages are on several ranks. Called by all ranks of the pipeline.

    Args:
        model: the parallel model.
        whole: the model of transformers that was cut.
        stages: what its stages run.
        num_microbatches: number of parts of a batch; rows are repeated, and not counted, where it does not divide it.

    Attributes:
        model: the parallel model.
    """

    def __init__(self, model: NxDModel, whole: Any, stages: BackboneStages, num_microbatches: int) -> None:
        self.model = model
        self._whole = whole
        self._stages = stages
        self._num_microbatches = num_microbatches
        self._own_forward = whole.forward  # the model's, or that of a script
        self._positional = list(inspect.signature(whole.base_model.forward).parameters)
        self._first_passes = count()
        self._ready: dict[int, _FirstPass] = {}  # those whose outputs have gradients, by their numbers
        functools.update_wrapper(self, self._own_forward)  # whose signature Trainer and generation read

    @torch.compiler.disable  # messages between stages are no part of a graph
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own forward, or the one that a script has set, computes from the backbone's outputs.

        Raises:
            ValueError: the backbone is called with an input that stages do not take.
        """
        return self._own_forward(*args, **kwargs)

    @torch.compiler.disable
    def run_backbone(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the backbone on every rank, as its class makes it: the backbone's own `forward`.

        Raises:
            ValueError: an input is not one of the stages'.
        """
        inputs = {**dict(zip(self._positional, args, strict=False)), **kwargs}
        self._check_inputs(inputs)
        inputs = {name: it for name, it in inputs.items() if name in self._stages.input_names and it is not None}
        random_state, autocast = get_rng_state(), _current_autocast()
        rows = next(it.shape[0] for name in ("input_ids", "inputs_embeds") if (it := inputs.get(name)) is not None)
        with torch.no_grad():
            form, outputs = self._shared(self.model.run_eval(**self._complete(inputs, rows), **{GRADIENTS: None}))
        padded = rows + -rows % self._num_microbatches
        outputs = [it[: it.shape[0] * rows // padded] for it in outputs]
        if not (torch.is_grad_enabled() and any(it.requires_grad for it in self._whole.parameters())):
            return form.filled(outputs)
        first = _FirstPass(inputs, rows, random_state, autocast, next(self._first_passes))
        anchor = outputs[0].new_empty(0, dtype=torch.float32).requires_grad_()
        return form.filled(_Outputs.apply(first, self._ready, anchor, *outputs))

    def finish_backward(self) -> None:
        """Train the stages by the gradients that backwards of the script have given to the outputs.

        Raises:
            ValueError: a loss depends on the head's parameters, and not on the outputs of the backbone.
        """
        if not self._ready and self._stages.head_has_gradients():
            raise ValueError(
                f"the loss depends on the head of {type(self._whole).__name__} and not on its backbone, whose outputs "
                "are perhaps detached or computed without gradients; use one pipeline stage for that"
            )
        for number in sorted(self._ready):
            first = self._ready.pop(number)
            self._stages.take_head_gradients()
            now = get_rng_state()
            set_rng_state(first.random_state)
            with first.autocast:
                self.model.run_train(**self._complete(first.inputs, first.rows), **{GRADIENTS: self._gradients(first)})
            first.gradients = []
            set_rng_state(now)

    def forget_backward(self) -> None:
        """Drop the gradients of backwards that no second pass has used, as `zero_grad` drops gradients."""
        self._ready.clear()
        self._stages.take_head_gradients()

    def _check_inputs(self, inputs: Mapping[str, Any]) -> None:
        kind = type(self._whole).__name__
        if refused := [name for name in _REFUSED if inputs.get(name) not in (None, False)]:
            raise ValueError(
                f"{kind} is cut into pipeline stages, which keep no {', '.join(refused)}; generate with "
                "use_cache=False, and leave outputs of single layers out"
            )
        if inputs.get("output_router_logits") and not self._stages.returns_routers:
            raise ValueError(
                f"{kind} is cut into pipeline stages that keep no router logits; set config.output_router_logits "
                "before Accelerator.prepare"
            )
        if any(isinstance(it, Tensor) and it.requires_grad for it in inputs.values()):
            raise ValueError(
                f"an input of {kind} requires gradients, which pipeline stages do not return; use one pipeline stage"
            )
        known = {*self._stages.input_names, *_NOT_PASSED_ON, *_REFUSED}
        if unknown := sorted(name for name, it in inputs.items() if it is not None and name not in known):
            raise ValueError(
                f"{kind} is cut into pipeline stages, which take {', '.join(self._stages.input_names[:-1])}; the "
                f"script also passes {', '.join(unknown)}"
            )

    def _complete(self, inputs: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """Add rows up to a multiple of the number of microbatches: the last one again."""
        more = -rows % self._num_microbatches
        if not more:
            return dict(inputs)
        return {
            name: torch.cat([value, value[-1:].expand(more, *value.shape[1:])])
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows
            else value
            for name, value in inputs.items()
        }

    def _gradients(self, first: _FirstPass) -> Microbatches:
        """Return the gradients of each microbatch's outputs; zeros for rows that were repeated."""
        parts_of_batch = self._num_microbatches
        parts: list[Sequence[Tensor | None]] = []
        for it in first.gradients:
            if it is None:
                parts.append([None] * parts_of_batch)
                continue
            more = it.shape[0] // first.rows * (-first.rows % parts_of_batch)
            weighed = it * parts_of_batch  # a pipeline's loss is the mean of its microbatches'
            parts.append(torch.cat([weighed, weighed.new_zeros(more, *it.shape[1:])]).chunk(parts_of_batch))
        return Microbatches(list(its) for its in zip(*parts, strict=True))

    def _shared(self, outputs: Any) -> tuple[OutputForm, list[Tensor]]:
        """Return the output of all microbatches, which the last rank of the pipeline has, and update the head."""
        pipeline = get_group("pp")
        form, own = None, []
        if outputs is not None:
            form = outputs[0]["form"]
            own = [torch.cat(its) for its in zip(*(it["outputs"] for it in outputs), strict=True)]
        described = (form, [(tuple(it.shape), it.dtype) for it in own], self._stages.head_is_changed())
        form, shapes, head_is_changed = all_gather_object(described, pipeline)[-1]
        if head_is_changed:
            self._stages.share_head()
        if not own:
            device = next(self.model.parameters()).device
            own = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        return form, [broadcast(it.contiguous(), pipeline, source=pipeline.size - 1) for it in own]


def _current_autocast() -> torch.autocast:
    """Return a context with the autocast that is in force."""
    kind = get_device().type
    return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))


def generates_without_cache(whole: Any) -> Any:
    """Return a `generate` for a model that is cut into stages. Called by all ranks of the pipeline.

    Stages keep no keys and values, so every token is computed from all tokens before it. The ranks draw tokens alike.
    """
    own = whole.generate

    @functools.wraps(own)
    def generate(*args: Any, **kwargs: Any) -> Any:
        set_rng_state(all_gather_object(get_rng_state(), get_group("pp"))[0])
        return own(*args, **{"use_cache": False, **kwargs})

    return generate
