"""Models as scripts make them: on which device, and traced when."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from nxd_engine.build import parameters_on_meta


def check_delay_tracing(nxd_config: Mapping[str, Any]) -> bool:
    """Whether tracing waits for the first batch: never, models are cut when they are made."""
    return False


def get_delay_tracing(arg: Any) -> bool:
    """As `check_delay_tracing`."""
    return False


@contextmanager
def init_on_device(
    device: torch.device | str, include_buffers: bool = False, force_custom_init_on_device: bool = False
) -> Iterator[None]:
    """Modules made inside have their parameters on `device`; on "meta" they take no memory.

    Args:
        device: on others than "meta" buffers, and tensors that name no device, are made there as well.
        include_buffers: with "meta", put buffers there, too; otherwise they have their values.
        force_custom_init_on_device: accepted without effect; there is one way to do it here.
    """
    device = torch.device(device)
    with parameters_on_meta(include_buffers=include_buffers) if device.type == "meta" else device:
        yield
