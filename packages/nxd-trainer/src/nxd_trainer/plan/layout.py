"""What is to be planned, the ways to lay it out over ranks, and which of these cannot be, told by arithmetic.

A job's model is that of a Hugging Face `config.json`, of a checkpoint, of single numbers, or of one and these.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from nxd_pipeline import SCHEDULE_NAMES
from nxd_state import Mesh

from nxd_trainer.api.checkpoint_tags import has_checkpoint, open_own
from nxd_trainer.hugging_face.folder import CONFIG_FILE
from nxd_trainer.model_description import description_of
from nxd_trainer.models import LlamaConfig
from nxd_trainer.plan.devices import Device
from nxd_trainer.recipe.checks import divisors

MICROBATCH_SIZES = (1, 2, 4, 8)
CHECKPOINTING = ("none", "full")
LLAMA_TYPES = ("llama", "mistral")  # with the same tensors
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class Job:
    """A training job, of which only the layout is open.

    Attributes:
        config: sizes of the model.
        device: what each rank runs on.
        num_devices: ranks.
        sequence_length: tokens in a sequence.
        global_batch_size: sequences in a step, over all ranks.
        dtype: of the weights.
        schedule: of pipelines, by its name in nxd-pipeline.

    Raises:
        ValueError: a number is not positive, the sequence is longer than the model is made for, or a name is unknown.
    """

    config: LlamaConfig
    device: Device
    num_devices: int
    sequence_length: int = 4096
    global_batch_size: int = 1024
    dtype: torch.dtype = torch.bfloat16
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        for name in ("num_devices", "sequence_length", "global_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.sequence_length > self.config.max_position_embeddings:
            raise ValueError(
                f"sequence_length={self.sequence_length} is more than max_position_embeddings="
                f"{self.config.max_position_embeddings}, for which the model is made; lower it"
            )
        trainable = [name for name in SCHEDULE_NAMES if name != "inference"]
        if self.schedule not in trainable:
            raise ValueError(f"schedule={self.schedule!r} does not train; use one of {', '.join(trainable)}")
        self.device.flops_of(self.dtype_name)

    @property
    def dtype_name(self) -> str:
        """Such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Degrees:
    """What is fixed beforehand; None leaves open.

    Attributes:
        tensor_parallel_size: ranks that split each layer.
        pipeline_parallel_size: ranks that share out the layers.
        sequence_parallel: activations split along the sequence, where ranks split layers.
        zero1: optimizer states shared out over the replicas.
        microbatch_size: sequences in a microbatch.
        checkpointing: "none" or "full".

    Raises:
        ValueError: a size is not positive, the form of checkpointing is unknown, or sequence parallelism is asked for
            where no ranks split a layer.
    """

    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    sequence_parallel: bool | None = None
    zero1: bool | None = None
    microbatch_size: int | None = None
    checkpointing: str | None = None

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "microbatch_size"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name}={size} must be 1 or more; leave it out to have it chosen")
        if self.checkpointing not in (None, *CHECKPOINTING):
            raise ValueError(f"checkpointing={self.checkpointing!r} is not known; use {' or '.join(CHECKPOINTING)}")
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "sequence_parallel splits activations over tensor-parallel ranks, and tensor_parallel_size=1; give "
                "tensor_parallel_size=2 or more, or leave one of them out"
            )


@dataclass(frozen=True, order=True)
class Layout:
    """One way to train the model on the ranks."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    sequence_parallel: bool
    zero1: bool
    microbatch_size: int
    num_microbatches: int
    checkpointing: str

    def __str__(self) -> str:
        """Such as "TP 8 + SP x PP 2 x DP 4, ZeRO-1, 16 microbatches of 1, checkpointing full"."""
        sequence_parallel = " + SP" if self.sequence_parallel else ""
        zero1 = ", ZeRO-1" if self.zero1 else ""
        return (
            f"TP {self.tensor_parallel_size}{sequence_parallel} x PP {self.pipeline_parallel_size} x DP "
            f"{self.data_parallel_size}{zero1}, {self.num_microbatches} microbatches of {self.microbatch_size}, "
            f"checkpointing {self.checkpointing}"
        )


@dataclass(frozen=True)
class Rejected:
    """A layout, or a group of them, that cannot be."""

    what: str
    reason: str


def tensor_parallel_sizes(job: Job, fixed: Degrees) -> list[int]:
    """The degrees to try: divisors of the ranks within one host, since layers exchange activations all the time."""
    if fixed.tensor_parallel_size is not None:
        return [fixed.tensor_parallel_size]
    return [size for size in divisors(job.num_devices) if size <= job.device.devices_per_host]


def pipeline_parallel_sizes(job: Job, fixed: Degrees, tensor_parallel_size: int) -> list[int]:
    """The degrees to try: divisors of the ranks that are left, up to the number of layers."""
    if fixed.pipeline_parallel_size is not None:
        return [fixed.pipeline_parallel_size]
    sizes = divisors(max(1, job.num_devices // tensor_parallel_size))
    return [size for size in sizes if size <= job.config.num_hidden_layers]


def mesh_of(job: Job, tensor_parallel_size: int, pipeline_parallel_size: int) -> Mesh:
    """The mesh of all ranks.

    Raises:
        ValueError: the degrees do not divide the ranks.
    """
    return Mesh(job.num_devices, pp=pipeline_parallel_size, tp=tensor_parallel_size)


def layouts_on(job: Job, fixed: Degrees, mesh: Mesh) -> Iterator[Layout | Rejected]:
    """All layouts with the degrees of a mesh, by ascending microbatches, and why others with these degrees are none."""
    what = f"TP {mesh.tp} x PP {mesh.pp} x DP {mesh.dp}"
    if job.global_batch_size % mesh.dp:
        below = job.global_batch_size // mesh.dp * mesh.dp
        use = f"{below} or {below + mesh.dp}" if below else str(mesh.dp)
        yield Rejected(
            what, f"global_batch_size={job.global_batch_size} is not a multiple of {mesh.dp} replicas; use {use}"
        )
        return
    per_replica = job.global_batch_size // mesh.dp
    sizes = MICROBATCH_SIZES if fixed.microbatch_size is None else (fixed.microbatch_size,)
    fitting = [size for size in sizes if size > 0 and per_replica % size == 0]
    if not fitting:
        yield Rejected(
            what, f"microbatch_size={fixed.microbatch_size} does not divide the {per_replica} sequences of a replica"
        )
    for sequence_parallel in _sequence_parallel_choices(fixed, mesh):
        if sequence_parallel and job.sequence_length % mesh.tp:
            yield Rejected(
                f"{what} + SP", f"tensor_parallel_size={mesh.tp} does not divide sequence_length={job.sequence_length}"
            )
            continue
        for zero1 in _zero1_choices(job, fixed, mesh):
            for checkpointing in CHECKPOINTING if fixed.checkpointing is None else (fixed.checkpointing,):
                for microbatch_size in fitting:
                    yield Layout(
                        mesh.tp,
                        mesh.pp,
                        mesh.dp,
                        sequence_parallel,
                        zero1,
                        microbatch_size,
                        per_replica // microbatch_size,
                        checkpointing,
                    )


def _sequence_parallel_choices(fixed: Degrees, mesh: Mesh) -> list[bool]:
    if mesh.tp == 1:
        return [False]
    return [False, True] if fixed.sequence_parallel is None else [fixed.sequence_parallel]


def _zero1_choices(job: Job, fixed: Degrees, mesh: Mesh) -> list[bool]:
    """Half-precision weights learn by their float32 masters, which ZeRO-1 brings."""
    if fixed.zero1 is not None:
        return [fixed.zero1]
    if job.dtype.itemsize < 4:
        return [True]
    return [False, True] if mesh.dp > 1 else [False]


def model_config(file: str | Path | None = None, sizes: Mapping[str, Any] | None = None) -> LlamaConfig:
    """The config of a Llama.

    Args:
        file: a Hugging Face `config.json`, or the folder it lies in; or a folder of checkpoints, of which the newest
            says its model.
        sizes: fields of `LlamaConfig` that go before those of the file; None counts as not given. Without a file they
            are all there is, so those that a file must have must be given.

    Raises:
        ValueError: the file cannot be read, is of another kind of model, or sizes are missing or no numbers.
        nxd_ckpt.CheckpointError: the checkpoint is damaged.
    """
    origin = "the flags" if file is None else str(_file_of(file))
    content = {} if file is None else _content(file)
    rotary = content.get("rope_parameters")  # where transformers 5 writes it
    if content.get("rope_theta") is None and isinstance(rotary, dict):
        content["rope_theta"] = rotary.get("rope_theta")
    content |= {name: value for name, value in (sizes or {}).items() if value is not None}
    missing = [name for name in REQUIRED if content.get(name) is None]
    if missing:
        flags = " ".join(f"--{name.replace('_', '-')} N" for name in missing)
        raise ValueError(f"{origin}: no {', '.join(missing)}; give a whole config.json, or {flags}")
    if content.get("num_key_value_heads") is None:
        content["num_key_value_heads"] = content["num_attention_heads"]
    known = {field.name: content[field.name] for field in fields(LlamaConfig) if content.get(field.name) is not None}
    wrong = [
        f"{name}={value!r}"
        for name, value in known.items()
        if name.startswith(("num_", "hidden", "intermediate", "vocab", "max_")) and not _is_size(value)
    ]
    if wrong:
        raise ValueError(f"{origin}: {', '.join(wrong)}; sizes are positive whole numbers")
    config = LlamaConfig(**known)
    config.check(1)
    _check_shape_of_layers(content, config, origin)
    return config


def _content(file: str | Path) -> dict[str, Any]:
    """What a config.json or a checkpoint says of a model."""
    is_checkpoint = not _file_of(file).is_file() and has_checkpoint(file)
    content = dict(description_of(open_own(file, None)).config) if is_checkpoint else _read(_file_of(file))
    kind = content.get("model_type", "llama")
    if kind not in LLAMA_TYPES:
        raise ValueError(
            f"{file}: model_type={kind!r}; plans are made with the layers of a Llama ({', '.join(LLAMA_TYPES)}). For "
            "another model of like shape give its sizes as flags"
        )
    return content


def _file_of(file: str | Path) -> Path:
    return Path(file) / CONFIG_FILE if Path(file).is_dir() else Path(file)


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}; give a Hugging Face config.json or its folder") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON: {error}; give a Hugging Face config.json") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}; a config.json holds an object with sizes")
    return content


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_shape_of_layers(content: Mapping[str, Any], config: LlamaConfig, origin: str) -> None:
    head_size = content.get("head_dim")
    if head_size is not None and head_size != config.head_size:
        raise ValueError(
            f"{origin}: head_dim={head_size}, but hidden_size / num_attention_heads = {config.head_size}; models with "
            "heads of another size cannot be planned yet"
        )
    biases = [f"{name}=true" for name in ("attention_bias", "mlp_bias") if content.get(name)]
    if biases:
        raise ValueError(f"{origin}: {', '.join(biases)}; layers with biases cannot be planned yet")
