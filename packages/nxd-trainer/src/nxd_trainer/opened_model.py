"""The model that a command is given: a Hugging Face folder, or a checkpoint, and an adapter beside either.

What a folder is, is told by its files: `config.json` makes a Hugging Face folder, `adapter_config.json` an adapter of
PEFT; everything else is looked into for checkpoints.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nxd_ckpt
import torch
from nxd_ckpt import Checkpoint, CheckpointError
from nxd_ckpt.interop import (
    GENERATION_CONFIG_FILE,
    TensorSource,
    companions_in,
    from_checkpoint,
    is_of_tokenizer,
    open_hugging_face,
    write_companions,
)
from nxd_engine.checkpoints.tags import open_own, open_own_together
from nxd_engine.hugging_face.folder import (
    CONFIG_FILE,
    parse_json_object,
    read_json_object,
    write_config,
)
from nxd_engine.hugging_face.loading import (
    read_model_config,
    stored_shapes,
    weights_fingerprint,
    whole_model_tensors,
)
from nxd_engine.hugging_face.rearrangement import Rearranged, RearrangedSource
from nxd_engine.logs import get_logger
from nxd_engine.model_description import (
    BYTES,
    InitialWeights,
    ModelDescription,
    adapter_in,
    common_dtype,
    description_of,
    holds_adapter_alone,
    model_dtype,
    tokenizer_in,
)
from nxd_engine.model_weights import ModelTensors, ModelWeights, merged_weights, model_weights
from nxd_engine.rank_sync import on_all_ranks
from nxd_lora import name_from_peft
from nxd_trace.serving.text import unseen_token

from nxd_trainer.data import Tokenizer, load_tokenizer
from nxd_trainer.data.chat import ChatTemplate, NoChatTemplateError

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"

OpenCheckpoint = Callable[[str | Path, str | None], Checkpoint]


@dataclass(frozen=True)
class OpenedModel:
    """A model whose weights have not been read yet.

    Attributes:
        description: of the model.
        weights: with adapters merged into them.
        dtype: of the weights.
        where: the model came from, for messages.
        tokenizer: that encodes its text: `BYTES`, or the folder that the user named; None: of the description's files.
    """

    description: ModelDescription
    weights: ModelWeights
    dtype: torch.dtype
    where: str
    tokenizer: str | None


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
    return _open_model(folder, tag, adapter, open_own_together, on_all_ranks)


def open_words(opened: OpenedModel, given: str | Path | None = None) -> Words:
    """The tokenizer of a model, or the one given in its place, with its chat template.

    Raises:
        ValueError: neither is known, or nothing usable is there.
    """
    if given or opened.tokenizer:
        return _words(opened, str(given or opened.tokenizer))
    with TemporaryDirectory() as folder:
        write_companions(opened.description.files, folder)
        if tokenizer_in(folder) is None:
            name = opened.description.tokenizer
            trained_with = f" (it was trained with {name}, which is not opened on a checkpoint's word)" if name else ""
            raise ValueError(
                f"{opened.where} comes without a tokenizer{trained_with}; give tokenizer= (on the command line "
                f'--tokenizer): a tokenizer.json, its folder, or "{BYTES}"'
            )
        write_config(folder, opened.description.config)  # some tokenizers are known by the model's type alone
        return _words(opened, folder)


def _words(opened: OpenedModel, path: str) -> Words:
    tokenizer = load_tokenizer(None if path == BYTES else path)
    try:
        chat = None if path == BYTES else ChatTemplate(path)
    except NoChatTemplateError:
        chat = None
    return Words(tokenizer, chat, _end_tokens(opened.description, tokenizer))


def _open_alone(doing: str, act: Callable[[], OpenedModel]) -> OpenedModel:
    del doing
    return act()


def _open_model(
    folder: str | Path,
    tag: str | None,
    adapter: str | Path | None,
    open_checkpoint: OpenCheckpoint,
    attempt: Callable[[str, Callable[[], OpenedModel]], OpenedModel] = _open_alone,
) -> OpenedModel:
    path = Path(folder)
    if (path / CONFIG_FILE).is_file():
        if tag is not None:
            raise ValueError(f"--tag {tag} names a checkpoint, and {folder} is a Hugging Face folder; leave it out")
        opened = _open_folder(path)
    elif (path / ADAPTER_CONFIG_FILE).is_file():
        base = read_json_object(path / ADAPTER_CONFIG_FILE).get("base_model_name_or_path") or "its base model"
        raise ValueError(f"{folder} is an adapter; give the model that it is for ({base}), and --adapter {folder}")
    else:
        checkpoint = open_checkpoint(folder, tag)
        opened = attempt(f"open {folder}", lambda: open_checkpointed_model(checkpoint, None))
    return opened if adapter is None else _with_adapter(opened, adapter, open_checkpoint)


def _open_folder(folder: Path) -> OpenedModel:
    config = read_model_config(folder)
    source = whole_model_tensors(folder)
    file = folder / GENERATION_CONFIG_FILE
    files = {file.name: file.read_bytes()} if file.is_file() else {}
    description = ModelDescription(config, None, str(folder.resolve()), stored_shapes(folder), files=files)
    dtype = common_dtype(info.dtype for info in source.tensors.values())
    weights = merged_weights(source, None, description)
    return OpenedModel(description, weights, dtype, str(folder), tokenizer_in(folder))


def open_checkpointed_model(checkpoint: Checkpoint, like: ModelDescription | None) -> OpenedModel:
    """The model in a checkpoint, with its adapter merged into it; the base of an adapter alone is where it says.

    Args:
        checkpoint: any of ours.
        like: description of the model in place of the checkpoint's own; its folder has the base of an adapter alone.

    Raises:
        ValueError: it does not say which model it is, or the base model is not there, or is another one by now.
        CheckpointError: files are damaged.
    """
    description = replace(like or description_of(checkpoint), files=companions_in(checkpoint))
    tokenizer = BYTES if description.tokenizer == BYTES else None
    where = f"checkpoint {checkpoint.tag!r}"
    if not holds_adapter_alone(checkpoint):
        weights = model_weights(checkpoint, description)
        return OpenedModel(description, weights, model_dtype(checkpoint), where, tokenizer)
    own, adapter = ModelTensors(from_checkpoint(checkpoint)), adapter_in(checkpoint)
    base = _open_base(description, where) if like is None else whole_model_tensors(str(like.folder))
    dtype = common_dtype(info.dtype for info in base.tensors.values())
    return OpenedModel(description, _merged_beside(base, own, adapter, description), dtype, where, tokenizer)


def _open_base(description: ModelDescription, where: str) -> TensorSource:
    """The weights that an adapter was trained with, where its checkpoint says they were."""
    initial = description.initial
    if initial is None:
        raise ValueError(
            f"{where} holds a LoRA adapter without its base model, and does not say where that is; give the base model "
            "in its place, and this folder as --adapter (of nxd export: as --like)"
        )
    get_logger("nxd_trainer").warning(
        f"the base model of the adapter in {where} is read from {initial}, as the checkpoint says"
    )
    try:
        return open_initial(initial)
    except (ValueError, OSError, CheckpointError) as error:
        raise ValueError(
            f"{where} holds a LoRA adapter, and its base model {initial} cannot be used: {error}. If it has moved, "
            "give it in the checkpoint's place, and this folder as --adapter (of nxd export: as --like)"
        ) from error


def open_initial(initial: InitialWeights) -> TensorSource:
    """The weights that a run began with, as one source of the whole model.

    Raises:
        ValueError: they are others by now, or not there.
        CheckpointError: files are damaged.
    """
    source: TensorSource
    if initial.tag is None:
        found, source = weights_fingerprint(initial.folder), whole_model_tensors(initial.folder)
    else:
        checkpoint = nxd_ckpt.open_checkpoint(initial.folder, initial.tag)
        found, source = checkpoint.save_id, ModelTensors(from_checkpoint(checkpoint))
    if found != initial.fingerprint:
        raise ValueError(f"{initial} holds other weights than when the run began")
    return source


def _with_adapter(opened: OpenedModel, adapter: str | Path, open_checkpoint: OpenCheckpoint) -> OpenedModel:
    if opened.weights.branches:
        raise ValueError(f"{opened.where} has an adapter already; leave out --adapter {adapter}")
    tensors, content, files = _open_adapter(Path(adapter), open_checkpoint)
    weights = _merged_beside(opened.weights.source, tensors, content, opened.description)
    beside = weights.tensors.keys() - opened.weights.tensors.keys()
    if beside or not weights.branches:
        what = f"has {sorted(beside)[0]!r}, which the model lacks" if beside else "adapts no layer of the model"
        raise ValueError(
            f"the adapter {adapter} does not fit {opened.where}: it {what}; give the model it was made for"
        )
    opened = replace(opened, weights=weights, where=f"{opened.where} with the adapter {adapter}")
    if any(map(is_of_tokenizer, files)):  # those that it was trained with
        return replace(opened, description=replace(opened.description, files=files), tokenizer=None)
    return opened


def _merged_beside(
    base: TensorSource, adapter: TensorSource, content: Mapping[str, Any] | None, description: ModelDescription
) -> ModelWeights:
    return merged_weights(_Beside(base, adapter), content, description)


def _open_adapter(
    folder: Path, open_checkpoint: OpenCheckpoint
) -> tuple[TensorSource, Mapping[str, Any], Mapping[str, bytes]]:
    """An adapter's tensors by our names, its description, and the files that lie beside it in a checkpoint."""
    if (folder / ADAPTER_CONFIG_FILE).is_file():
        content = read_json_object(folder / ADAPTER_CONFIG_FILE)
        if content.get("target_parameters"):
            raise ValueError(
                f"--adapter {folder} adapts weights of experts (target_parameters), which are merged here from "
                "checkpoints only; have PEFT merge it (merge_and_unload), and give the merged model"
            )
        stored = open_hugging_face(folder / ADAPTER_FILE)
        named = {name_from_peft(name): (name, info.global_shape) for name, info in stored.tensors.items()}
        whole = {ours: Rearranged.whole(*theirs) for ours, theirs in named.items()}
        return RearrangedSource(stored, whole), content, {}
    try:
        checkpoint = open_checkpoint(folder, None)
    except CheckpointError as error:
        raise ValueError(
            f"--adapter {folder} holds neither {ADAPTER_CONFIG_FILE} nor a checkpoint of an adapter: {error}"
        ) from error
    found = adapter_in(checkpoint)
    if found is None:
        raise ValueError(f"--adapter {folder} holds a checkpoint without an adapter; give it as the model")
    if not holds_adapter_alone(checkpoint):
        raise ValueError(f"--adapter {folder} holds the adapter with its base model; give it as the model")
    return ModelTensors(from_checkpoint(checkpoint)), found, companions_in(checkpoint)


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
    if GENERATION_CONFIG_FILE in description.files:
        content = parse_json_object(GENERATION_CONFIG_FILE, description.files[GENERATION_CONFIG_FILE])
        named = content.get("eos_token_id", named)
    listed = named if isinstance(named, list) else [named]
    ids = {token for token in listed if isinstance(token, int) and token >= 0}
    return tuple(sorted({*ids, tokenizer.end_of_document}))
