"""Making models on another device than their code says."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def init_on_device(device: torch.device | str, include_buffers: bool = False) -> Iterator[None]:
    """Modules made inside have their parameters on `device`; on "meta" they take no memory.

    Args:
        device: on others than "meta" buffers, and tensors that name no device, are made there as well.
        include_buffers: with "meta", put buffers there, too; otherwise they have their values.
    """
    from nxd_trainer.api.meta_device import parameters_on_meta  # noqa: PLC0415 - brings in all of the trainer

    device = torch.device(device)
    with parameters_on_meta(include_buffers=include_buffers) if device.type == "meta" else device:
        yield
