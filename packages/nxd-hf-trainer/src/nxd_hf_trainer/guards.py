"""What a split model checks of its script: equal batches on the ranks of a replica, and whole tensors to save."""

import hashlib
from typing import Any

import torch
from nxd_engine import NxDModel
from nxd_engine.hugging_face import whole_state_dict
from nxd_state import all_gather_object, all_ranks, get_group, is_peft_model
from torch import Tensor

_CHECKED_CALLS = 2  # later ones follow from the same seeds
_AXES = ("tp", "cp", "pp")  # along which ranks hold one replica


def check_first_batches(model: NxDModel) -> None:
    """Compare the first batches of the ranks of each replica, which must be equal.

    The model's first calls raise a ValueError on every rank of the replica if they differ.
    """
    if all(get_group(axis).size == 1 for axis in _AXES):
        return
    calls = 0

    @torch.compiler.disable  # Trainer's torch_compile would trace the exchange of objects
    def check(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal calls
        calls += 1
        if calls > _CHECKED_CALLS:
            handle.remove()
            return
        digests = {name: _digest(it) for name, it in kwargs.items() if isinstance(it, Tensor)}
        for axis in _AXES:
            found = all_gather_object(digests, get_group(axis))
            differing = sorted(
                {name for it in found for name in it.keys() | digests if it.get(name) != found[0].get(name)}
            )
            if differing:
                raise ValueError(
                    f"the ranks of one replica were given different batches: {', '.join(differing)} differ. Each must "
                    "draw the same data: seed what shuffles or draws, equally on all ranks, and divide data by "
                    "accelerator.process_index, not by the environment's RANK"
                )

    handle = model.register_forward_pre_hook(check, with_kwargs=True)


def _digest(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous()
    described = f"{values.dtype} {tuple(values.shape)}".encode()
    return hashlib.sha256(described + values.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def save_pretrained_of(module: Any, model: NxDModel) -> Any:
    """Return a `save_pretrained` for a split model of transformers or PEFT, which writes whole tensors.

    It collects them if the caller passes `is_main_process`: such a call is documented as one that all ranks make.
    """
    own = module.save_pretrained

    def save_pretrained(
        save_directory: Any,
        is_main_process: bool | None = None,
        state_dict: dict[str, Tensor] | None = None,
        **settings: Any,
    ) -> None:
        if state_dict is None and is_main_process is None:
            raise ValueError(
                f"this {type(module).__name__} is split, so all ranks must call save_pretrained: pass "
                "is_main_process=accelerator.is_main_process, or state_dict=accelerator.get_state_dict(model), or use "
                "Trainer.save_model"
            )
        if state_dict is None:
            state_dict = whole_tensors(module, model)
        if is_main_process is False or not state_dict:
            return
        if is_peft_model(module):
            own(save_directory, state_dict=dict(state_dict), **settings)
            return
        with torch.device("meta"):
            unsplit = type(module)(module.config).to(next(iter(state_dict.values())).dtype)
        unsplit.save_pretrained(save_directory, state_dict=dict(state_dict), **settings)

    return save_pretrained


def whole_tensors(module: Any, model: NxDModel) -> dict[str, Tensor]:
    """Return what `save_pretrained` writes: whole tensors, of PEFT models those of adapters. Called by all ranks.

    Other ranks than the first one get an empty dict.
    """
    if not is_peft_model(module):
        with all_ranks():
            return whole_state_dict(model)
    here = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    trained = {name for names in all_gather_object(here, get_group("pp")) for name in names}
    with all_ranks():
        return whole_state_dict(model, lambda name: "lora_" in name or name in trained)
