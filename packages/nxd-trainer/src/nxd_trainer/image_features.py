"""What a model's towers make of a prompt's images: the model without its language model.

The model's own forward merges images into embeddings and chooses positions and masks. It runs up to the call of its
language model, whose arguments are the result; so each model's way of reading images is transformers', not ours.
"""

import inspect
import threading
from collections.abc import Mapping
from typing import Any

import torch
from nxd_engine.checkpoints.fill import fill_state
from nxd_engine.checkpoints.merged_weights import ModelWeights, model_on_meta_of
from nxd_engine.checkpoints.model_description import ModelDescription
from nxd_engine.checkpoints.state import model_state
from nxd_engine.hugging_face.loading import make_room
from nxd_state import is_multimodal
from nxd_trace.generation import PromptInputs, PromptInputShapes
from torch import Tensor, nn

# Arguments of a language model that are read here, and those that say nothing of images.
_READ = {"inputs_embeds", "attention_mask", "position_ids", "visual_pos_masks", "vision_mask"}
_ADDED_AFTER, _ADDED_BEFORE = "deepstack_visual_embeds", "deepstack_features"
_PLAIN = {"input_ids", "use_cache", "return_dict", "cache", "past_key_values", "cache_position", "logits_to_keep"}


class ImageFeatures:
    """Computes the features of prompts with images.

    Args:
        description: the model's description.
        weights: the model's weights, of which those of the towers are read.
        dtype: dtype of the weights.

    Raises:
        ValueError: the model takes no images.
        nxd_ckpt.CheckpointError: the weights are damaged.
    """

    def __init__(self, description: ModelDescription, weights: ModelWeights, dtype: torch.dtype) -> None:
        self._architecture = description.architecture
        model: Any = model_on_meta_of(description)
        if not is_multimodal(model):
            raise ValueError(f"{self._architecture} takes text alone")
        self._hidden_size: int = model.config.get_text_config().hidden_size
        _leave_out_language_model(model, _NoEmbeddings(self._hidden_size, dtype))
        make_room(model, dtype)
        fill_state(weights, model_state(model))
        self._model = model.eval()
        self._dtype = dtype
        self._names = set(inspect.signature(inspect.unwrap(type(model).forward)).parameters)
        self._lock = threading.Lock()

    def shapes(self, inputs: Mapping[str, Tensor]) -> PromptInputShapes:
        """Return what the language model takes, given the inputs of any prompt with an image."""
        arguments = self._arguments(inputs)
        found = self._prompt_inputs(arguments)
        given = set(found.at.tolist())
        lengths = [stop - start if given.issuperset(range(start, stop)) else None for start, stop in found.spans]
        return PromptInputShapes(
            hidden_size=self._hidden_size,
            dtype=self._dtype,
            layers=tuple(_added_to_layers(arguments)),
            num_axes=0 if found.rotary is None else found.rotary.shape[1],
            longest_span=None if None in lengths else max((it for it in lengths if it), default=1),
        )

    def __call__(self, inputs: Mapping[str, Tensor]) -> PromptInputs:
        """Return the features of one prompt.

        Args:
            inputs: `input_ids` `[1, tokens]`, and the other inputs of the model's forward.

        Raises:
            ValueError: the model passes its images on in a way that is not supported.
        """
        return self._prompt_inputs(self._arguments(inputs))

    def _arguments(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the arguments of the language model."""
        device = next(self._model.parameters()).device
        given = {name: value.to(device) for name, value in inputs.items() if name in self._names}
        given = {name: value.to(self._dtype) if value.is_floating_point() else value for name, value in given.items()}
        try:
            with self._lock, torch.no_grad():  # one at a time, for memory
                self._model(**given)
        except _Called as call:
            return call.arguments
        raise AssertionError("the forward ended without a call of the language model")

    def _prompt_inputs(self, arguments: Mapping[str, Any]) -> PromptInputs:
        unknown = {
            name
            for name, value in arguments.items()
            if value is not None and name not in _READ | _PLAIN | {_ADDED_AFTER, _ADDED_BEFORE}
        }
        if unknown or arguments.get("inputs_embeds") is None:
            named = ", ".join(sorted(unknown)) or "no embeddings"
            raise ValueError(f"{self._architecture} gives its layers {named}, which compiled models do not take")
        embeddings: Tensor = arguments["inputs_embeds"][0]  # [tokens, hidden]
        is_given = ~embeddings.isnan().all(1)
        at = is_given.nonzero()[:, 0]
        added = _added_to_layers(arguments)
        features = torch.stack([embeddings[at], *(values.to(embeddings) for values in added.values())], dim=1)
        positions = arguments.get("position_ids")
        rotary = None if positions is None or positions.dim() == 2 else positions[-3:, 0].t().contiguous().cpu()
        return PromptInputs(at.cpu(), features.cpu(), self._spans(arguments.get("attention_mask")), rotary)

    def _spans(self, mask: Any) -> tuple[tuple[int, int], ...]:
        """Return the runs of tokens that attend to each other, given the masks of the layers."""
        masks = mask if isinstance(mask, dict) else {"full_attention": mask}
        whole = masks.get("full_attention")
        if whole is None or whole.dim() == 2:
            return ()
        attends = whole[0, 0] if whole.dtype == torch.bool else whole[0, 0] == 0  # [tokens, tokens]
        columns = torch.arange(len(attends), device=attends.device)
        last = (attends * columns).amax(1)
        if not torch.equal(attends, columns <= last.unsqueeze(1)):
            raise ValueError(f"{self._architecture} has masks for its images which compiled models do not take")
        spans: list[tuple[int, int]] = []
        for position, end in enumerate(last.tolist()):
            if end > position and not (spans and position < spans[-1][1]):
                spans.append((position, end + 1))
        return tuple(spans)


class _Called(Exception):
    """Ends a forward where the language model would be called."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = dict(arguments)


class _NoEmbeddings(nn.Module):
    """Embeds every token as NaN, so that what is put into the place of some can be told from the others."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._hidden_size = hidden_size
        self.weight = torch.empty(0, dtype=dtype)  # models ask it for its dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        shape = (*input_ids.shape, self._hidden_size)
        return torch.full(shape, torch.nan, dtype=self.weight.dtype, device=input_ids.device)


def _leave_out_language_model(model: Any, embeddings: nn.Module) -> None:
    """Remove the language model's parameters, and end a forward at its call."""
    language_model, head = model.get_decoder(), model.get_output_embeddings()
    language_model.set_input_embeddings(embeddings)
    for name, child in list(language_model.named_children()):
        if child is not embeddings:
            delattr(language_model, name)
    for name, child in list(model.named_children()):
        if child is head:
            setattr(model, name, None)

    def call(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        names = inspect.signature(inspect.unwrap(type(language_model).forward)).parameters
        raise _Called({**dict(zip(list(names)[1:], args, strict=False)), **given})

    language_model.register_forward_pre_hook(call, with_kwargs=True)


def _added_to_layers(arguments: Mapping[str, Any]) -> dict[int, Tensor]:
    """Return what is added to the hidden states of the images' tokens before each layer, `[given, hidden]`."""
    after, before = arguments.get(_ADDED_AFTER), arguments.get(_ADDED_BEFORE)
    if after is not None:
        return {layer + 1: values for layer, values in enumerate(after)}
    return dict(sorted((before or {}).items()))
