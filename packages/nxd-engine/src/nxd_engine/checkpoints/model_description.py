"""The description of the model in a checkpoint: one description under one key, for every writer of checkpoints.

It is the content of a Hugging Face `config.json`, since the tensors have the names and shapes of that model in memory.
The config of this package's own Llama is that of a `LlamaForCausalLM`, and ours runs every such model it supports. The
files of the tokenizer, the chat template and the generation config are stored next to it, so the checkpoint is
self-contained. It may come from a stranger: paths on this machine that it names are shown to people, never opened.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from nxd_ckpt import Checkpoint
from nxd_ckpt.interop import read_companions
from nxd_lora import LoraModel
from nxd_pipeline import NxDPPModel
from nxd_state import is_transformers_model
from torch import nn

from nxd_engine.checkpoints.state import kind_of, weights_kept_as_masters
from nxd_engine.models import LlamaConfig

_logger = logging.getLogger(__name__)

KEY = "model"
BYTES = "bytes"  # instead of a tokenizer's file: one token per byte

ADAPTER_KEY = "lora"
ROPE_TYPES = ("linear", "dynamic", "yarn", "longrope", "llama3")  # our Llama lets transformers compute these
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True)
class InitialWeights:
    """The weights that a run started from, which its adapters or its reference model need again.

    Attributes:
        folder: the folder of a Hugging Face model or of checkpoints.
        tag: the checkpoint's tag; None for a Hugging Face model.
        fingerprint: a text that changes whenever the weights there change.
    """

    folder: str
    tag: str | None
    fingerprint: str

    def __str__(self) -> str:
        return self.folder if self.tag is None else f"{self.folder}/{self.tag}"


@dataclass(frozen=True)
class ModelDescription:
    """A checkpoint's description of its model.

    Attributes:
        config: content of its `config.json`.
        tokenizer: the tokenizer: `BYTES`, or its name, which is shown but not opened; None if unknown.
        folder: the folder that the model was loaded from, for people; None if it was not loaded.
        stored_shapes: names and shapes of the tensors in that folder's files; None for those of transformers itself.
        factory: for a model without such a config, the `model.factory` of its recipe; `config` holds the arguments.
            It is shown to people, and never imported.
        initial: the base weights of an adapter that is saved without them; also those of a reference model, and those
            that hold what is left out.
        left_out: paths of the modules and parameters that the run left out of the model; their weights are those of
            `initial`.
        files: the files of tokenizer, chat template and generation config, by their names in a model's folder. They
            are stored next to a checkpoint's other values, see `nxd_ckpt.interop.read_companions`.
    """

    config: Mapping[str, Any]
    tokenizer: str | None = None
    folder: str | None = None
    stored_shapes: Mapping[str, tuple[int, ...]] | None = None
    factory: str | None = None
    initial: InitialWeights | None = None
    left_out: Sequence[str] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The transformers class, such as "LlamaForCausalLM"; the model's type if no class is named."""
        named = self.config.get("architectures") or self.config.get("model_type")
        return str(named[0] if isinstance(named, list) else named)

    def as_objects(self) -> dict[str, Any]:
        """Return the description as a checkpoint's objects."""
        values = {
            "config": dict(self.config),
            "tokenizer": self.tokenizer,
            "folder": self.folder,
            "stored_shapes": None if self.stored_shapes is None else dict(self.stored_shapes),
            "factory": self.factory,
            "initial": None if self.initial is None else asdict(self.initial),
            "left_out": list(self.left_out) or None,
        }
        return {KEY: {name: value for name, value in values.items() if value is not None}}

    def own_llama(self) -> LlamaConfig:
        """Return the sizes of this package's own Llama that fit the tensors."""
        return own_llama_config(self.config)

    def own_llama_at(self, tensor_parallel_size: int) -> LlamaConfig | None:
        """Like `own_llama`; None if ours does not support the model at this degree, so transformers' is used."""
        try:
            config = self.own_llama()
            config.check(tensor_parallel_size)
        except ValueError:
            return None
        return config

    def check_own_llama(self, tensor_parallel_size: int) -> None:
        """Raise ValueError if ours supports the model, but not at this degree; transformers' cannot split it either."""
        config = self.own_llama_at(1)
        if config is not None:
            config.check(tensor_parallel_size)


def describe_model(model: nn.Module, inside: nn.Module) -> ModelDescription | None:
    """Describe a model for a checkpoint: a transformers model, or our own Llama; None for others.

    Args:
        model: the model as given to `save_checkpoint`; its `config` is used.
        inside: the model without its wrappers, or the pipeline with its stages.
    """
    whole: Any = model.module if isinstance(model, LoraModel) else model
    of_transformers: Any = next(filter(is_transformers_model, inside.modules()), None)  # the outermost one
    config = getattr(of_transformers if isinstance(whole, NxDPPModel) else whole, "config", None)
    if isinstance(config, LlamaConfig):
        return describe_llama(config)
    if of_transformers is None or of_transformers.config is not config:
        return None
    content = json.loads(config.to_json_string(), parse_constant=str)  # a checkpoint holds finite numbers only
    content["architectures"] = [type(of_transformers).__name__]
    origin = str(getattr(whole, "name_or_path", "") or "")
    return ModelDescription(content, folder=str(Path(origin).resolve()) if origin and Path(origin).is_dir() else None)


def with_companions(description: ModelDescription) -> ModelDescription:
    """Add the files of the folder that the model was loaded from to a description, if they can be read."""
    if description.folder is None:
        return description
    try:
        return replace(description, files=read_companions(description.folder))
    except (ValueError, OSError) as error:  # the weights are still worth saving
        _logger.warning("the checkpoint holds no tokenizer: %s", error)
        return description


def describe_llama(
    config: LlamaConfig, *, tokenizer: str | None = None, end_token: int | None = None
) -> ModelDescription:
    """Describe our own Llama."""
    return ModelDescription(hugging_face_config(config, end_token=end_token), tokenizer)


def find_description(checkpoint: Checkpoint) -> ModelDescription | None:
    """Return the description in a checkpoint; None if there is none."""
    objects = checkpoint.objects if isinstance(checkpoint.objects, dict) else {}
    found = objects.get(KEY)
    if isinstance(found, dict) and isinstance(found.get("config"), dict):
        shapes = found.get("stored_shapes")
        return ModelDescription(
            found["config"],
            found.get("tokenizer"),
            found.get("folder"),
            {name: tuple(shape) for name, shape in shapes.items()} if isinstance(shapes, dict) else None,
            found.get("factory"),
            _initial_weights(found.get("initial")),
            [str(path) for path in found.get("left_out") or ()],
        )
    return _described_before(objects)


def _initial_weights(found: Any) -> InitialWeights | None:
    if not isinstance(found, dict) or not isinstance(found.get("folder"), str):
        return None
    return InitialWeights(found["folder"], found.get("tag"), str(found.get("fingerprint")))


def description_of(checkpoint: Checkpoint) -> ModelDescription:
    """Return the description of the model whose weights a checkpoint holds.

    Raises:
        ValueError: it has no description, or holds no whole model; the message says what to do.
    """
    where = f"checkpoint {checkpoint.tag!r}"
    adapter_in(checkpoint)
    has_weights = any(kind_of(name) == "model" for name in checkpoint.tensors)
    if not has_weights and not weights_kept_as_masters(checkpoint.tensors):
        raise ValueError(f"{where} holds no model; pass one that was saved with model=")
    description = find_description(checkpoint)
    if description is None:
        raise ValueError(
            f"{where} does not say which model it holds; pass a folder of the same model, with its config.json, to "
            "`nxd export CHECKPOINT NEW_FOLDER --like FOLDER`. For a checkpoint that names its model, then run "
            "`nxd import NEW_FOLDER NEW_CHECKPOINT`. The Llama of a script for NeuronX Distributed becomes a folder by "
            "`nxd ckpt convert CHECKPOINT NEW_FOLDER --to hf --sharding llama`"
        )
    if description.factory is not None:
        raise ValueError(
            f"{where} holds a model made by the function {description.factory}, and code that a checkpoint names is "
            "not run; make the model yourself, and fill it with load_checkpoint. nxd train resumes from it with the "
            "recipe that it was written with"
        )
    return description


def adapter_in(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Return the description of the LoRA adapter in a checkpoint; None if it holds no adapter."""
    if not isinstance(checkpoint.objects, dict) or ADAPTER_KEY not in checkpoint.objects:
        return None
    found = checkpoint.objects[ADAPTER_KEY]
    if not isinstance(found, dict) or not isinstance(found.get("adapter"), dict):
        raise ValueError(f"checkpoint {checkpoint.tag!r} holds a LoRA adapter without a description; save it again")
    adapter: Mapping[str, Any] = found["adapter"]
    return adapter


def holds_adapter_alone(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds a LoRA adapter without its base model."""
    return adapter_in(checkpoint) is not None and not checkpoint.objects[ADAPTER_KEY].get("has_base")


def model_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the most common dtype of the model's weights in a checkpoint."""
    return common_dtype(info.dtype for name, info in checkpoint.tensors.items() if kind_of(name) == "model")


def common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the most common floating-point dtype; torch's default if there is none."""
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    return max(floating, key=floating.count, default=torch.get_default_dtype())


def tokenizer_in(folder: str | Path | None) -> str | None:
    """Return the folder if it exists and holds a tokenizer, else None."""
    found = folder is not None and any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES)
    return str(folder) if found else None


def own_llama_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Return the sizes in a `config.json`, for this package's own Llama."""
    if config.get("model_type") != "llama" or config.get("architectures") not in (None, ["LlamaForCausalLM"]):
        raise ValueError(f"{config.get('architectures') or config.get('model_type')} is not a LlamaForCausalLM")
    theta, scaling = rope_of(config)
    sizes = {field.name: config[field.name] for field in fields(LlamaConfig) if config.get(field.name) is not None}
    sizes |= {"rope_theta": theta, "rope_scaling": scaling}
    sizes.setdefault("num_key_value_heads", sizes.get("num_attention_heads", LlamaConfig.num_attention_heads))
    numbers = {name: value for name, value in sizes.items() if name != "rope_scaling"}
    strange = [f"{name}={value!r}" for name, value in numbers.items() if not isinstance(value, int | float)]
    if strange:
        raise ValueError(f"the sizes of a Llama must be numbers; got {', '.join(strange)}")
    made = LlamaConfig(**sizes)
    expected = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": made.head_size,
        "partial_rotary_factor": 1.0,
    }
    found = {**config, **(scaling or {})}
    wrong = [f"{name}={found[name]}" for name, value in expected.items() if found.get(name, value) not in (None, value)]
    if made.rope_type not in ("default", *ROPE_TYPES):
        wrong.append(f"rope type={made.rope_type}")
    if wrong:
        raise ValueError(f"this package's own Llama does not support {', '.join(wrong)}")
    return made


def rope_of(config: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """Return the base of the rotary frequencies in a `config.json` and their scaling, in the form of `LlamaConfig`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters={rope!r} is not a table of settings")
    theta = rope.get("rope_theta", config.get("rope_theta", LlamaConfig.rope_theta))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    further = {name: value for name, value in rope.items() if name not in ("rope_theta", "rope_type", "type")}
    return theta, {"rope_type": kind, **further}


def hugging_face_config(config: LlamaConfig, *, end_token: int | None) -> dict[str, Any]:
    """Return the `config.json` of a LlamaForCausalLM with these sizes, without the dtype of its weights."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: value for name, value in asdict(config).items() if name != "rope_scaling"},
        **({} if config.rope_scaling is None else {"rope_scaling": dict(config.rope_scaling)}),
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": None,
        "bos_token_id": None,
        "eos_token_id": end_token,
    }


def _described_before(objects: Mapping[str, Any]) -> ModelDescription | None:
    """Read the description in older checkpoints of `nxd train` and `nxd import`, which did not use one key."""
    recipe = objects.get("recipe")
    data = recipe.get("data") if isinstance(recipe, dict) else None
    tokenizer = str(data.get("tokenizer", BYTES)) if isinstance(data, dict) else None
    origin = objects.get("hugging_face")
    if isinstance(origin, dict) and origin.keys() >= {"tensors", "config", "folder"}:
        shapes = {name: tuple(shape) for name, shape in origin["tensors"].items()}
        return ModelDescription(origin["config"], tokenizer, origin["folder"], shapes)
    sizes = objects.get(KEY)
    names = {field.name for field in fields(LlamaConfig)}
    if tokenizer is None or not isinstance(sizes, dict) or not sizes or not sizes.keys() <= names:
        return None
    return describe_llama(LlamaConfig(**sizes), tokenizer=tokenizer, end_token=objects.get("end_of_document"))
