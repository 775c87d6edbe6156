"""Records the steps of one process, with plain PyTorch: whole batches, whole tensors, no parallel runtime."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from nxd_engine.adapters import initialize_lora_model
from nxd_parity import events, record
from nxd_pipeline.runtime.loss import check_loss, pick_loss
from nxd_state import move_model_to_device
from torch import Tensor

from nxd_trainer.parity.case import ParityCase, inputs_in, make_model
from nxd_trainer.parity.trained_state import TrainedState


def record_one_process(
    case: ParityCase,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    folder: Path,
    skipped: int,
    noise: int | None = None,
) -> None:
    """Train one process on the whole batches, without communication. The mesh must have no TP and no PP.

    Args:
        case: the case to compare.
        config: its complete config; only keys that change the numbers are used.
        dtype: dtype of weights and inputs.
        device: where to compute.
        folder: the recording.
        skipped: the number of steps before the recording begins.
        noise: the seed of rounding noise; see `nxd_parity.record`.
    """
    model = make_model(case.reference_fn or case.model_fn, case.seed, dtype)
    if config["lora_config"] is not None:
        initialize_lora_model(model, config["lora_config"])
    move_model_to_device(model, device)
    optimizer = case.optimizer_class(case.parameter_groups(model), **case.optimizer_arguments)
    options = config["optimizer_config"]
    limit = options["max_grad_norm"] if options["grad_clipping"] else float("inf")

    def backward(batch: Mapping[str, Any]) -> Tensor:
        optimizer.zero_grad()
        output = model(**inputs_in(dtype, batch, device))
        spec = (config["pipeline_config"] or {}).get("output_loss_value_spec")
        if spec is None and not isinstance(output, Tensor):
            spec = {"loss": True}  # the name in transformers models
        loss = check_loss(pick_loss(output, spec))
        loss.backward()
        return loss

    for batch in case.batches[:skipped]:
        backward(batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
    with record(folder, by_hand=True, alone=True, noise=noise) as recorder:
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        state = TrainedState(recorder, model, optimizer, names, is_whole=True)
        state.parameters()
        state.optimizer_states()
        for batch in case.batches[skipped:]:
            recorder.tensor(events.LOSS, "", backward(batch))
            state.own_gradients()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            recorder.tensor(events.GRADIENT_NORM, "", norm)
            optimizer.step()
            recorder.end_step()
            state.optimizer_states()
            state.parameters()
