"""Opens the model that a command is given: a Hugging Face folder or a checkpoint, with an optional adapter.

The format is detected from the files: `config.json` means a Hugging Face folder, `adapter_config.json` a PEFT adapter;
any other folder is searched for checkpoints.
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
from nxd_data import Tokenizer, load_tokenizer
from nxd_data.chat import ChatTemplate, NoChatTemplateError
from nxd_data.image_processor import ImageProcessor
from nxd_engine.checkpoints.find import open_own, open_own_together
from nxd_engine.checkpoints.merged_weights import (
    ModelTensors,
    ModelWeights,
    holds_average,
    merged_weights,
    model_on_meta_of,
    model_weights,
)
from nxd_engine.checkpoints.model_description import (
    BYTES,
    InitialWeights,
    ModelDescription,
    adapter_in,
    common_dtype,
    description_of,
    find_description,
    holds_adapter_alone,
    model_dtype,
    tokenizer_in,
)
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
from nxd_engine.rank_sync import run_or_raise_peer_error
from nxd_lora import name_from_peft
from nxd_state import is_multimodal
from nxd_trace.serving.detokenizer import special_token

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"

OpenCheckpoint = Callable[[str | Path, str | None], Checkpoint]


@dataclass(frozen=True)
class OpenedModel:
    """A model whose weights have not been read yet."""

    description: ModelDescription  # the model's description
    weights: ModelWeights  # the weights, with adapters merged into them
    dtype: torch.dtype  # the dtype of the weights
    where: str  # the model's source, for messages
    tokenizer: str | None  # `BYTES`, or the folder that the user named; None: the tokenizer in the description's files


@dataclass(frozen=True)
class TextCodec:
    """The text side of a model: its tokenizer, chat template and end tokens."""

    tokenizer: Tokenizer  # the model's tokenizer
    chat: ChatTemplate | None  # the chat template; None if there is none
    end_tokens: tuple[int, ...]  # tokens that end a text

    def ending_at(self, stops: Iterable[str]) -> "TextCodec":
        """Return a copy that also ends texts at each token that one of these stop texts spells: `<|im_end|>`."""
        tokens = (special_token(text, self.tokenizer.encode, self.tokenizer.decode) for text in stops)
        return replace(self, end_tokens=(*self.end_tokens, *(token for token in tokens if token is not None)))


def open_model(folder: str | Path, tag: str | None = None, *, adapter: str | Path | None = None) -> OpenedModel:
    """Open a model for one process to read.

    Args:
        folder: a Hugging Face folder with safetensors, or a folder of checkpoints.
        tag: the checkpoint's name; the newest complete one if None.
        adapter: the folder of a LoRA adapter in PEFT's format, or of checkpoints of one without its base model.

    Raises:
        ValueError: the folder holds no model, or the adapter does not fit the model.
        nxd_ckpt.CheckpointError: there is no such checkpoint, or files are damaged.
    """
    return _open_model(folder, tag, adapter, open_own)


def open_model_together(
    folder: str | Path, tag: str | None = None, *, adapter: str | Path | None = None
) -> OpenedModel:
    """Like `open_model`, with the same model on all ranks. Call it on all ranks.

    Raises:
        RuntimeError: another rank could not open it.
    """
    of_peft = adapter is None or (Path(adapter) / ADAPTER_CONFIG_FILE).is_file()
    if of_peft and (Path(folder) / CONFIG_FILE).is_file():
        return run_or_raise_peer_error(f"opening {folder}", lambda: _open_model(folder, tag, adapter, open_own))
    return _open_model(folder, tag, adapter, open_own_together, run_or_raise_peer_error)


def open_codec(opened: OpenedModel, given: str | Path | None = None) -> TextCodec:
    """Open a model's tokenizer, or the given one in its place, with its chat template.

    Raises:
        ValueError: no tokenizer is known, or it is not usable.
    """
    if given or opened.tokenizer:
        return _codec(opened, str(given or opened.tokenizer))
    with TemporaryDirectory() as folder:
        write_companions(opened.description.files, folder)
        if tokenizer_in(folder) is None:
            name = opened.description.tokenizer
            trained_with = f" (it names {name}, which is not opened on the checkpoint's word alone)" if name else ""
            raise ValueError(
                f"{opened.where} has no tokenizer{trained_with}; give tokenizer= (on the command line "
                f'--tokenizer): a tokenizer.json, its folder, or "{BYTES}"'
            )
        write_config(folder, opened.description.config)  # some tokenizers can only be identified by the model's type
        return _codec(opened, folder)


def reads_images(opened: OpenedModel) -> bool:
    """Whether a model has encoders beside its language model."""
    return opened.description.own_llama_at(1) is None and is_multimodal(model_on_meta_of(opened.description))


def open_image_processor(opened: OpenedModel, given: str | Path | None = None) -> ImageProcessor:
    """Open a model's image processor, or the one beside the given tokenizer.

    Raises:
        ValueError: the model reads text alone, or there is no processor, or it cannot be used here.
    """
    if not reads_images(opened):
        raise ValueError(f"{opened.where} ({opened.description.architecture}) reads text alone, not images")
    path = given or opened.tokenizer
    if path and path != BYTES:
        return ImageProcessor(Path(path) if Path(path).is_dir() else Path(path).parent)
    with TemporaryDirectory() as folder:
        write_companions(opened.description.files, folder)
        write_config(folder, opened.description.config)
        return ImageProcessor(Path(folder))


def _codec(opened: OpenedModel, path: str) -> TextCodec:
    tokenizer = load_tokenizer(None if path == BYTES else path)
    try:
        chat = None if path == BYTES else ChatTemplate(path)
    except NoChatTemplateError:
        chat = None
    return TextCodec(tokenizer, chat, _end_tokens(opened.description, tokenizer))


def _open_model(
    folder: str | Path,
    tag: str | None,
    adapter: str | Path | None,
    open_checkpoint: OpenCheckpoint,
    attempt: Callable[[str, Callable[[], OpenedModel]], OpenedModel] = lambda _, act: act(),
) -> OpenedModel:
    path = Path(folder)
    if (path / CONFIG_FILE).is_file():
        if tag is not None:
            raise ValueError(f"--tag {tag} names a checkpoint, but {folder} is a Hugging Face folder; leave --tag out")
        opened = _open_folder(path)
    elif (path / ADAPTER_CONFIG_FILE).is_file():
        base = read_json_object(path / ADAPTER_CONFIG_FILE).get("base_model_name_or_path") or "its base model"
        raise ValueError(f"{folder} is an adapter; give its base model ({base}), and --adapter {folder}")
    else:
        checkpoint = open_checkpoint(folder, tag)
        opened = attempt(f"opening {folder}", lambda: open_checkpointed_model(checkpoint, None))
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


def open_weights_like(description: ModelDescription, folder: str | Path) -> ModelWeights:
    """Open safetensors files of the model that is described, under its Hugging Face names. Adds `config.json` to them.

    Raises:
        ValueError: the files do not hold exactly the tensors of the model, or are damaged.
    """
    write_config(folder, {key: value for key, value in description.config.items() if key != "transformers_weights"})
    try:
        return merged_weights(whole_model_tensors(folder), None, description)
    except CheckpointError as error:
        raise ValueError(str(error)) from error


def open_checkpointed_model(
    checkpoint: Checkpoint, like: ModelDescription | None, *, averaged: bool = False
) -> OpenedModel:
    """Open the model in a checkpoint, with its adapter merged; an adapter without base model names where that is.

    Args:
        checkpoint: a checkpoint in our format.
        like: a model description to use instead of the checkpoint's; its folder has the base model of an adapter.
        averaged: whether to take the moving average of the weights (`train.ema_decay`) in their place.

    Raises:
        ValueError: the checkpoint has no average, it does not say which model it holds, or its base model is missing
            or has changed.
        CheckpointError: files are damaged.
    """
    description = replace(like or description_of(checkpoint), files=companions_in(checkpoint))
    tokenizer = BYTES if description.tokenizer == BYTES else None
    where = f"checkpoint {checkpoint.tag!r}"
    if averaged and not holds_average(checkpoint):
        raise ValueError(
            f"{where} has no moving average of the weights; leave --ema out. Runs with train.ema_decay keep one"
        )
    stored = find_description(checkpoint)  # other programs' checkpoints have none
    has_base, left_out = not holds_adapter_alone(checkpoint), () if stored is None else stored.left_out
    if has_base and not left_out:
        weights = model_weights(checkpoint, description, averaged=averaged)
        return OpenedModel(description, weights, model_dtype(checkpoint), where, tokenizer)
    own, adapter = ModelTensors(from_checkpoint(checkpoint), averaged), adapter_in(checkpoint)
    what = f"the model without {', '.join(left_out)}" if has_base else "a LoRA adapter without its base model"
    base = _open_base(description, where, what) if like is None else whole_model_tensors(str(like.folder))
    dtype = model_dtype(checkpoint) if has_base else common_dtype(info.dtype for info in base.tensors.values())
    return OpenedModel(description, _merged_beside(base, own, adapter, description), dtype, where, tokenizer)


def _open_base(description: ModelDescription, where: str, what: str) -> TensorSource:
    """Open the weights that a checkpoint lacks in the place that it names.

    Args:
        description: the checkpoint's description.
        where: the checkpoint, for messages.
        what: its contents, for messages.
    """
    initial = description.initial
    is_adapter = not description.left_out
    instead = (
        "give it instead, and this folder as --adapter (for nxd export, give the base model as --like)"
        if is_adapter
        else "for nxd export, give it as --like"
    )
    if initial is None:
        raise ValueError(f"{where} holds {what}, and does not name the model it started from; {instead}")
    part = "the base model of the adapter" if is_adapter else f"what is left out ({', '.join(description.left_out)})"
    get_logger("nxd_trainer").warning(f"reading {part} in {where} from {initial}, which the checkpoint names")
    try:
        return open_initial(initial)
    except (ValueError, OSError, CheckpointError) as error:
        raise ValueError(
            f"{where} holds {what}, and the model that it started from, {initial}, cannot be used: {error}. If it has "
            f"moved, {instead}"
        ) from error


def open_initial(initial: InitialWeights) -> TensorSource:
    """Open the weights that a run started from, as one source of the whole model.

    Raises:
        ValueError: the weights have changed, or are missing.
        CheckpointError: files are damaged.
    """
    source: TensorSource
    if initial.tag is None:
        found, source = weights_fingerprint(initial.folder), whole_model_tensors(initial.folder)
    else:
        checkpoint = nxd_ckpt.open_checkpoint(initial.folder, initial.tag)
        found, source = checkpoint.save_id, ModelTensors(from_checkpoint(checkpoint))
    if found != initial.fingerprint:
        raise ValueError(f"the weights in {initial} have changed since the run started")
    return source


def _with_adapter(opened: OpenedModel, adapter: str | Path, open_checkpoint: OpenCheckpoint) -> OpenedModel:
    if opened.weights.branches:
        raise ValueError(f"{opened.where} already has an adapter; leave out --adapter {adapter}")
    tensors, content, files = _open_adapter(Path(adapter), open_checkpoint)
    weights = _merged_beside(opened.weights.source, tensors, content, opened.description)
    beside = weights.tensors.keys() - opened.weights.tensors.keys()
    if beside or not weights.branches:
        what = f"has {sorted(beside)[0]!r}, which the model lacks" if beside else "adapts no layer of the model"
        raise ValueError(f"the adapter {adapter} does not fit {opened.where}: it {what}; give the adapter's base model")
    opened = replace(opened, weights=weights, where=f"{opened.where} with the adapter {adapter}")
    if any(map(is_of_tokenizer, files)):  # the files of the tokenizer it was trained with
        return replace(opened, description=replace(opened.description, files=files), tokenizer=None)
    return opened


def _merged_beside(
    base: TensorSource, adapter: TensorSource, content: Mapping[str, Any] | None, description: ModelDescription
) -> ModelWeights:
    return merged_weights(_Beside(base, adapter), content, description)


def _open_adapter(
    folder: Path, open_checkpoint: OpenCheckpoint
) -> tuple[TensorSource, Mapping[str, Any], Mapping[str, bytes]]:
    """Open an adapter: its tensors by our names, its description, and the companion files in its checkpoint."""
    if (folder / ADAPTER_CONFIG_FILE).is_file():
        content = read_json_object(folder / ADAPTER_CONFIG_FILE)
        if content.get("target_parameters"):
            raise ValueError(
                f"--adapter {folder} adapts expert weights (target_parameters), which can only be merged from "
                "checkpoints; merge it with PEFT (merge_and_unload), and give the merged model"
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
    """A model's tensors and an adapter's as one `TensorSource`; the adapter's biases replace the model's."""

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
    """Return the end tokens that transformers uses, and the tokenizer's."""
    named: Any = description.config.get("eos_token_id")
    if GENERATION_CONFIG_FILE in description.files:
        content = parse_json_object(GENERATION_CONFIG_FILE, description.files[GENERATION_CONFIG_FILE])
        named = content.get("eos_token_id", named)
    listed = named if isinstance(named, list) else [named]
    ids = {token for token in listed if isinstance(token, int) and token >= 0}
    return tuple(sorted({*ids, tokenizer.end_of_document}))
