"""The model that a command is given: a Hugging Face folder, or a checkpoint, and an adapter beside either.

What a folder is, is told by its files: `config.json` makes a Hugging Face folder, `adapter_config.json` an adapter of
PEFT; everything else is looked into for checkpoints.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from nxd_ckpt import Checkpoint, CheckpointError
from nxd_ckpt.interop import TensorSource, from_checkpoint, open_hugging_face
from nxd_layers.lora import name_from_peft
from nxd_trace.serving.text import unseen_token

from nxd_trainer.api.checkpoint_tags import open_own, open_own_together
from nxd_trainer.api.rank_sync import on_all_ranks
from nxd_trainer.data import Tokenizer, load_tokenizer
from nxd_trainer.data.chat import ChatTemplate, NoChatTemplateError
from nxd_trainer.hugging_face.folder import CONFIG_FILE, read_config, read_json_object
from nxd_trainer.hugging_face.loading import stored_shapes, whole_model_tensors
from nxd_trainer.hugging_face.rearrangement import Rearranged, RearrangedSource
from nxd_trainer.model_description import (
    ADAPTER_KEY,
    BYTES,
    ModelDescription,
    common_dtype,
    description_of,
    model_dtype,
    tokenizer_in,
)
from nxd_trainer.model_weights import ModelWeights, merged_weights, model_weights

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
GENERATION_CONFIG_FILE = "generation_config.json"

OpenCheckpoint = Callable[[str | Path, str | None], Checkpoint]


@dataclass(frozen=True)
class OpenedModel:
    """A model whose weights have not been read yet.

    Attributes:
        description: of the model.
        weights: with adapters merged into them.
        dtype: of the weights.
        where: the model came from, for messages.
    """

    description: ModelDescription
    weights: ModelWeights
    dtype: torch.dtype
    where: str


@dataclass(frozen=True)
class Words:
    """What a model reads and writes texts with.

    Attributes:
        tokenizer: of the model.
        chat: the template of its conversations; None without.
        end_tokens: each ends a text.
    """

    tokenizer: Tokenizer
    chat: ChatTemplate | None
    end_tokens: tuple[int, ...]

    def ending_at(self, stops: Iterable[str]) -> "Words":
        """The same, with texts also ending at each token that one of these stop texts spells, such as `<|im_end|>`."""
        tokens = (unseen_token(text, self.tokenizer.encode, self.tokenizer.decode) for text in stops)
        return replace(self, end_tokens=(*self.end_tokens, *(token for token in tokens if token is not None)))


def open_model(folder: str | Path, tag: str | None = None, *, adapter: str | Path | None = None) -> OpenedModel:
    """Open a model for one process to read.

    Args:
        folder: of a Hugging Face model with safetensors, or of checkpoints.
        tag: of the checkpoint; the newest complete one if None.
        adapter: the folder of a LoRA adapter as PEFT writes it, or of checkpoints of one without its base model.

    Raises:
        ValueError: the folder is none of these, or the adapter does not fit the model.
        nxd_ckpt.CheckpointError: there is no such checkpoint, or files are damaged.
    """
    return _open_model(folder, tag, adapter, open_own)


def open_model_together(
    folder: str | Path, tag: str | None = None, *, adapter: str | Path | None = None
) -> OpenedModel:
    """As `open_model`, the same model on all ranks. Called by all ranks.

    Raises:
        RuntimeError: another rank could not open it.
    """
    of_peft = adapter is None or (Path(adapter) / ADAPTER_CONFIG_FILE).is_file()
    if of_peft and (Path(folder) / CONFIG_FILE).is_file():
        return on_all_ranks(f"open {folder}", lambda: _open_model(folder, tag, adapter, open_own))
    return _open_model(folder, tag, adapter, open_own_together)


def open_words(description: ModelDescription, given: str | Path | None = None) -> Words:
    """The tokenizer of a model, or the one given in its place, with its chat template.

    Raises:
        ValueError: neither is known, or nothing usable is there.
    """
    known = given or description.tokenizer or tokenizer_in(description.folder)
    if known is None:
        raise ValueError(
            "the folder does not say which tokenizer its model reads; give tokenizer= (on the command line "
            f'--tokenizer): a tokenizer.json, its folder, or "{BYTES}"'
        )
    is_bytes = str(known) == BYTES
    tokenizer = load_tokenizer(None if is_bytes else known)
    try:
        chat = None if is_bytes else ChatTemplate(known)
    except NoChatTemplateError:
        chat = None
    return Words(tokenizer, chat, _end_tokens(description, tokenizer))


def _open_model(
    folder: str | Path, tag: str | None, adapter: str | Path | None, open_checkpoint: OpenCheckpoint
) -> OpenedModel:
    path = Path(folder)
    if (path / CONFIG_FILE).is_file():
        if tag is not None:
            raise ValueError(f"--tag {tag} names a checkpoint, and {folder} is a Hugging Face folder; leave it out")
        config = read_config(path)
        source: TensorSource = whole_model_tensors(path)
        origin = str(path.resolve())
        description = ModelDescription(config, tokenizer_in(origin), origin, stored_shapes(path))
        dtype = common_dtype(info.dtype for info in source.tensors.values())
        opened = OpenedModel(description, merged_weights(source, None, description), dtype, str(folder))
    elif (path / ADAPTER_CONFIG_FILE).is_file():
        base = read_json_object(path / ADAPTER_CONFIG_FILE).get("base_model_name_or_path") or "its base model"
        raise ValueError(f"{folder} is an adapter; give the model that it is for ({base}), and --adapter {folder}")
    else:
        checkpoint = open_checkpoint(folder, tag)
        description = description_of(checkpoint)
        weights = model_weights(checkpoint, description)
        opened = OpenedModel(description, weights, model_dtype(checkpoint), f"checkpoint {checkpoint.tag!r}")
    return opened if adapter is None else _with_adapter(opened, adapter, open_checkpoint)


def _with_adapter(opened: OpenedModel, adapter: str | Path, open_checkpoint: OpenCheckpoint) -> OpenedModel:
    if opened.weights.branches:
        raise ValueError(f"{opened.where} has an adapter already; leave out --adapter {adapter}")
    tensors, content = _open_adapter(Path(adapter), open_checkpoint)
    weights = merged_weights(_Beside(opened.weights.source, tensors), content, opened.description)
    beside = weights.tensors.keys() - opened.weights.tensors.keys()
    if beside or not weights.branches:
        what = f"has {sorted(beside)[0]!r}, which the model lacks" if beside else "adapts no layer of the model"
        raise ValueError(
            f"the adapter {adapter} does not fit {opened.where}: it {what}; give the model it was made for"
        )
    return OpenedModel(opened.description, weights, opened.dtype, f"{opened.where} with the adapter {adapter}")


def _open_adapter(folder: Path, open_checkpoint: OpenCheckpoint) -> tuple[TensorSource, Mapping[str, Any]]:
    """An adapter's tensors by our names, and its description."""
    if (folder / ADAPTER_CONFIG_FILE).is_file():
        content = read_json_object(folder / ADAPTER_CONFIG_FILE)
        if content.get("target_parameters"):
            raise ValueError(
                f"--adapter {folder} adapts weights of experts (target_parameters), which are merged here from "
                "checkpoints only; have PEFT merge it (merge_and_unload), and give the merged model"
            )
        stored = open_hugging_face(folder / ADAPTER_FILE)
        named = {name_from_peft(name): (name, info.global_shape) for name, info in stored.tensors.items()}
        return RearrangedSource(stored, {ours: Rearranged.whole(*theirs) for ours, theirs in named.items()}), content
    try:
        checkpoint = open_checkpoint(folder, None)
    except CheckpointError as error:
        raise ValueError(
            f"--adapter {folder} holds neither {ADAPTER_CONFIG_FILE} nor a checkpoint of an adapter: {error}"
        ) from error
    found = checkpoint.objects.get(ADAPTER_KEY) if isinstance(checkpoint.objects, dict) else None
    if not isinstance(found, dict) or not isinstance(found.get("adapter"), dict):
        raise ValueError(f"--adapter {folder} holds a checkpoint without an adapter; give it as the model")
    if found.get("has_base"):
        raise ValueError(f"--adapter {folder} holds the adapter with its base model; give it as the model")
    return from_checkpoint(checkpoint), found["adapter"]


@dataclass(frozen=True)
class _Beside:
    """A model's tensors and an adapter's, as one `TensorSource`; of biases that both have, the adapter's."""

    model: TensorSource
    adapter: TensorSource

    objects = None
    is_mapped = False

    @property
    def tensors(self) -> Mapping[str, Any]:
        return {**self.model.tensors, **self.adapter.tensors}

    def shards(self, name: str, box: Any) -> Any:
        source = self.adapter if name in self.adapter.tensors else self.model
        return source.shards(name, box)


def _end_tokens(description: ModelDescription, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Those that transformers would end at, and the tokenizer's."""
    named: Any = description.config.get("eos_token_id")
    file = Path(description.folder or "") / GENERATION_CONFIG_FILE
    if description.folder is not None and file.is_file():
        named = read_json_object(file).get("eos_token_id", named)
    listed = named if isinstance(named, list) else [named]
    ids = {token for token in listed if isinstance(token, int) and token >= 0}
    return tuple(sorted({*ids, tokenizer.end_of_document}))
