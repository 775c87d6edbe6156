"""A model that is cut into pipeline stages, called as if it were whole: `accelerator.backward(model(**inputs).loss)`.

A script computes its loss from the model's outputs, and calls backward on it. So the stages run twice. The first pass,
without gradients, gives the outputs to every rank of the pipeline. Backward of what the script computed from them gives
their gradients. The second pass, which `Accelerator.backward` runs, is a training step of the pipeline with the same
random numbers, and the sum of outputs times gradients as its loss: the gradients of the parameters are then those of
the script's loss. One forward more is computed, as with activation checkpointing of the whole model (Chen et al. 2016).
"""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from nxd_engine import NxDModel
from nxd_state import all_gather_object, broadcast, get_group, get_rng_state, set_rng_state, takes_causal_lm_loss
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutputWithPast

_GRADIENTS = "output_gradients"  # the input of the second pass
_OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch")
_OF_GENERATION = ("past_key_values", "cache_position", "logits_to_keep", "use_cache")
_NOT_PASSED_ON = (*_OF_GENERATION, "return_dict", "output_attentions", "output_hidden_states")


class SecondPass:
    """Hooks of a model that is not cut yet: its stages then return sums of outputs times given gradients.

    Args:
        whole: a model of transformers that returns logits.

    Attributes:
        loss_function: the model's own function of its logits and labels; None if it has another one than language
            models and classifiers usually have.
    """

    def __init__(self, whole: Any) -> None:
        known = takes_causal_lm_loss(whole) or _is_classifier(whole)
        self.loss_function = whole.loss_function if known else None
        self._gradients: Tensor | None = None
        whole.register_forward_pre_hook(self._take, with_kwargs=True)
        whole.register_forward_hook(self._weigh)

    def _take(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._gradients = kwargs.get(_GRADIENTS)
        return args, {name: value for name, value in kwargs.items() if name != _GRADIENTS}

    def _weigh(self, module: nn.Module, args: Any, output: Any) -> Any:
        gradients, self._gradients = self._gradients, None
        return output if gradients is None else {"loss": (output.logits * gradients).sum()}


def inputs_of_stages(whole: Any) -> list[str]:
    """Return the names of the inputs that the stages of a model take."""
    left_out = {*_OF_THE_LOSS, *_NOT_PASSED_ON}
    named = inspect.signature(whole.forward).parameters.values()
    return [*(it.name for it in named if it.kind is not it.VAR_KEYWORD and it.name not in left_out), _GRADIENTS]


class _FirstPass(NamedTuple):
    """What the second pass repeats: the inputs, their number of rows, and the state of random generators."""

    inputs: Mapping[str, Any]
    rows: int
    random_state: Any


class PipelinedForward:
    """The `forward` of a model whose stages are on several ranks. Called by all ranks of the pipeline.

    Args:
        model: the parallel model.
        whole: the model of transformers that was cut.
        loss_function: see `SecondPass`.
        num_microbatches: number of parts of a batch; rows are repeated, and not counted, where it does not divide it.
    """

    def __init__(self, model: NxDModel, whole: Any, loss_function: Any, num_microbatches: int) -> None:
        self._model = model
        self._whole = whole
        self._loss_function = loss_function
        self._num_microbatches = num_microbatches
        self._names = inputs_of_stages(whole)
        self._waiting: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the first pass of outputs without gradients yet

    @torch.compiler.disable  # messages between stages are no part of a graph
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return loss and logits on every rank.

        Raises:
            ValueError: an input is not one of the model's, or its loss is not known.
        """
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        of_loss = {name: given.pop(name) for name in _OF_THE_LOSS if name in given}
        inputs = {name: value for name, value in given.items() if name not in _NOT_PASSED_ON and value is not None}
        if unknown := sorted(inputs.keys() - set(self._names)):
            raise ValueError(
                f"{type(self._whole).__name__} is cut into stages, which take {', '.join(self._names[:-1])}; "
                f"the script also passes {', '.join(unknown)}"
            )
        return self._with_loss(self._logits(inputs), of_loss)

    def _logits(self, inputs: Mapping[str, Any]) -> Tensor:
        random_state = get_rng_state()
        rows = next(value.shape[0] for value in inputs.values() if isinstance(value, Tensor))
        with torch.no_grad():
            logits = self._shared(self._model.run_eval(**self._complete(inputs, rows), **{_GRADIENTS: None}))[:rows]
        if not torch.is_grad_enabled():
            return logits
        self._waiting[logits.requires_grad_()] = _FirstPass(inputs, rows, random_state)
        return logits.clone()  # which the script may change

    def finish_backward(self) -> None:
        """Train the stages by the gradients that a backward of the script has given to the outputs."""
        for logits, first in list(self._waiting.items()):
            if logits.grad is None:
                continue
            del self._waiting[logits]
            now = get_rng_state()
            set_rng_state(first.random_state)
            weighed = {_GRADIENTS: logits.grad * self._num_microbatches}  # a pipeline's loss is the mean of its parts
            self._model.run_train(
                **self._complete(first.inputs, first.rows), **self._complete(weighed, first.rows, repeated=False)
            )
            set_rng_state(now)

    def _complete(self, inputs: Mapping[str, Any], rows: int, *, repeated: bool = True) -> dict[str, Any]:
        """Add rows up to a multiple of the number of microbatches: the last one again, or zeros."""
        more = -rows % self._num_microbatches
        if not more:
            return dict(inputs)

        def longer(value: Tensor) -> Tensor:
            last = value[-1:].expand(more, *value.shape[1:])
            return torch.cat([value, last if repeated else torch.zeros_like(last)])

        return {
            name: longer(value) if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows else value
            for name, value in inputs.items()
        }

    def _shared(self, outputs: Any) -> Tensor:
        """Return the logits of all microbatches, which the last rank of the pipeline has."""
        pipeline = get_group("pp")
        logits = None if outputs is None else torch.cat([output.logits for output in outputs])
        described = None if logits is None else (tuple(logits.shape), logits.dtype, str(logits.device.type))
        shape, dtype, _ = all_gather_object(described, pipeline)[-1]
        if logits is None:
            device = next(self._model.parameters()).device
            logits = torch.empty(shape, dtype=dtype, device=device)
        return broadcast(logits.contiguous(), pipeline, source=pipeline.size - 1)

    def _with_loss(self, logits: Tensor, of_loss: Mapping[str, Any]) -> Any:
        output = SequenceClassifierOutputWithPast if _is_classifier(self._whole) else CausalLMOutputWithPast
        if of_loss.get("labels") is None and of_loss.get("shift_labels") is None:
            return output(logits=logits)
        if self._loss_function is None:
            raise ValueError(
                f"{type(self._whole).__name__} computes its loss in its own way, which is not known outside of its "
                "last stage; use one pipeline stage, or compute the loss from the logits in the script"
            )
        config = self._whole.config
        further = (
            {"pooled_logits": logits, "config": config}
            if _is_classifier(self._whole)
            else {"vocab_size": config.get_text_config().vocab_size}
        )
        loss = self._loss_function(logits=logits, **{"labels": None, **of_loss}, **further)
        return output(loss=loss, logits=logits)


def _is_classifier(whole: Any) -> bool:
    return type(whole).__name__.endswith("ForSequenceClassification")
