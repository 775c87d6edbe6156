"""DeepSpeed ZeRO 1 to 3, in the forms to which DeepSpeed itself consolidates its checkpoints.

- The universal folder of `ds_to_universal.py`: `zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt`, and model states.
- The weights of `zero_to_fp32.py`: `pytorch_model.bin`, or several files with an index.

The folder of a run, whose files hold each rank's part of flat buffers, is refused with the commands that convert it.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.files import has_file
from nxd_ckpt.interop.huggingface.reading import read_index
from nxd_ckpt.interop.safe_pickle import load_torch_file
from nxd_ckpt.interop.source import TensorSource
from nxd_ckpt.interop.torch_files import OPTIMIZER_PREFIX, FilesOfTensors, load_mapping, plain_tensor

WEIGHTS_FILE = "pytorch_model.bin"
WEIGHTS_INDEX = "pytorch_model.bin.index.json"

_ZERO = "zero"
_LATEST = ("latest_universal", "latest")  # text files with the name of a folder beside them
_MODEL_STATES = re.compile(r"(?:zero_pp_rank_0_)?mp_rank_00_model_states\.pt")
_SHARDED_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt")
_WEIGHTS_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.bin")


def is_deepspeed(folder: str) -> bool:
    """Whether `open_deepspeed` recognizes a folder: to open it, or to say how to consolidate it."""
    at = _folder_of_latest(folder)
    return _is_universal(at) or _is_sharded(at) or has_file(folder, WEIGHTS_FILE) or has_file(folder, WEIGHTS_INDEX)


def open_deepspeed(folder: "str | os.PathLike[str]") -> TensorSource:
    """Open a universal checkpoint of DeepSpeed, or the weights that its `zero_to_fp32.py` wrote.

    Weights keep their names. States of the universal form are named `optimizer/<parameter>/<key>`, as nxd-engine's
    `load_checkpoint` and `nxd train` expect them. Nothing is unpickled without restrictions; tensors stay mapped files.

    Args:
        folder: the checkpoint, or the folder with a file `latest_universal` or `latest` that names it.

    Raises:
        CheckpointError: it is neither, it is damaged, or a file asks for something that is not allowed. For the
            folder of a run the message has the commands that consolidate it.
    """
    path = os.fspath(folder)
    at = _folder_of_latest(path)
    if _is_universal(at):
        return _open_universal(at)
    if has_file(path, WEIGHTS_FILE) or has_file(path, WEIGHTS_INDEX):
        return FilesOfTensors(dict(_weights(path)))
    if _is_sharded(at):
        raise CheckpointError(_how_to_consolidate(at))
    raise CheckpointError(
        f"{path} holds neither a universal checkpoint of DeepSpeed (a folder {_ZERO}) nor {WEIGHTS_FILE}; pass the "
        "folder that ds_to_universal.py or zero_to_fp32.py wrote"
    )


def _folder_of_latest(folder: str) -> str:
    for name in _LATEST:
        if has_file(folder, name):
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                inner = file.read(1000).strip()
            if inner and inner == os.path.basename(inner) and os.path.isdir(os.path.join(folder, inner)):
                return os.path.join(folder, inner)
    return folder


def _is_universal(folder: str) -> bool:
    zero = os.path.join(folder, _ZERO)
    return os.path.isdir(zero) and any(has_file(os.path.join(zero, name), "fp32.pt") for name in os.listdir(zero))


def _is_sharded(folder: str) -> bool:
    return os.path.isdir(folder) and any(map(_SHARDED_STATES.fullmatch, os.listdir(folder)))


def _how_to_consolidate(folder: str) -> str:
    run, tag = os.path.split(os.path.abspath(folder))
    return (
        f"{folder} holds each rank's part of flat buffers of DeepSpeed. Consolidate it with DeepSpeed. Weights and "
        f"optimizer states: python -m deepspeed.checkpoint.ds_to_universal --input_folder {folder} --output_folder "
        f"{folder}_universal (with --inject_missing_state for ZeRO 1 and 2 without universal_checkpoint_info); "
        f"weights alone: python {run}/zero_to_fp32.py {run} {run}-fp32 -t {tag}. Then: nxd-ckpt convert "
        f"{folder}_universal NEW --to nxd --target-tag start, or the same with {run}-fp32"
    )


def _open_universal(folder: str) -> TensorSource:
    zero = os.path.join(folder, _ZERO)
    names = sorted(name for name in os.listdir(zero) if has_file(os.path.join(zero, name), "fp32.pt"))
    files = sorted(filter(_MODEL_STATES.fullmatch, os.listdir(folder)))
    model_states = load_mapping(os.path.join(folder, files[0])) if files else {}
    shapes = _shapes(model_states.get("param_shapes"))
    steps = _steps_taken(model_states)
    values: dict[str, torch.Tensor] = dict(_not_optimized(model_states, set(names), folder))
    for name in names:
        for file in sorted(os.listdir(os.path.join(zero, name))):
            key, suffix = os.path.splitext(file)
            path = os.path.join(zero, name, file)
            if suffix == ".pt":
                logical = name if key == "fp32" else f"{OPTIMIZER_PREFIX}{name}/{key}"
                values[logical] = _state(path, None if key == "step" else shapes.get(name))
        has_moments = any(it.startswith(f"{OPTIMIZER_PREFIX}{name}/") for it in values)
        if steps is not None and has_moments:  # ZeRO 3 has no step.pt
            values.setdefault(f"{OPTIMIZER_PREFIX}{name}/step", torch.tensor(float(steps)))
        _check_shapes(name, values)
    return FilesOfTensors(values, None if steps is None else {"step": steps})


def _state(path: str, shape: tuple[int, ...] | None) -> torch.Tensor:
    """Return the tensor of one file: itself, or below "param"; ZeRO 3 has it flat."""
    content = load_torch_file(path)
    value = content.get("param") if isinstance(content, Mapping) else content
    if isinstance(value, int | float):
        return torch.tensor(float(value))
    tensor = plain_tensor(value, f"the value in {path}")
    if tensor.ndim != 1 or shape is None:
        return tensor
    if tensor.numel() != math.prod(shape):
        raise CheckpointError(f"{path} holds {tensor.numel()} elements, but the model states say {list(shape)}")
    return tensor.reshape(shape)


def _check_shapes(name: str, values: Mapping[str, torch.Tensor]) -> None:
    for key in ("exp_avg", "exp_avg_sq"):
        state = values.get(f"{OPTIMIZER_PREFIX}{name}/{key}")
        if state is not None and state.shape != values[name].shape:
            raise CheckpointError(f"{key} of {name} is {list(state.shape)}, but the weight {list(values[name].shape)}")


def _shapes(groups: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes by parameter from a list with a dict for each group."""
    groups = groups if isinstance(groups, list) else []
    return {
        name: tuple(int(size) for size in shape)
        for group in groups
        if isinstance(group, Mapping)
        for name, shape in group.items()
    }


def _steps_taken(model_states: Mapping[str, Any]) -> int | None:
    done, skipped = model_states.get("global_steps"), model_states.get("skipped_steps", 0)
    if type(done) is not int or type(skipped) is not int or not 0 <= skipped <= done:
        return None
    return done - skipped


def _not_optimized(
    model_states: Mapping[str, Any], optimized: set[str], folder: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield buffers and frozen parameters, which the files of model states hold."""
    module = model_states.get("module")
    module = module if isinstance(module, Mapping) else {}
    frozen = _shapes([model_states.get("frozen_param_shapes")])
    for name in [*(model_states.get("buffer_names") or []), *frozen]:
        value = module.get(name)
        if name in optimized or value is None:
            continue
        tensor = plain_tensor(value, f"{name} in {folder}")
        if name in frozen and tuple(tensor.shape) != frozen[name]:
            raise CheckpointError(
                f"{folder} has the frozen parameter {name} {list(frozen[name])} in parts of several ranks (ZeRO 3), "
                "which ds_to_universal.py does not merge; take the weights of zero_to_fp32.py"
            )
        yield name, tensor


def _weights(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    if has_file(folder, WEIGHTS_FILE):
        path = os.path.join(folder, WEIGHTS_FILE)
        for name, value in load_mapping(path).items():
            yield name, plain_tensor(value, f"{name!r} in {path}")
        return
    file_of = read_index(os.path.join(folder, WEIGHTS_INDEX), _WEIGHTS_NAME)
    for file in sorted(set(file_of.values())):
        path = os.path.join(folder, file)
        content = load_mapping(path)
        for name in (name for name, its_file in file_of.items() if its_file == file):
            if name not in content:
                raise CheckpointError(f"{path} lacks {name!r}, which the index {WEIGHTS_INDEX} lists there")
            yield name, plain_tensor(content[name], f"{name!r} in {path}")
