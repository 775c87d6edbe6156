"""All checks, in the order in which they explain each other."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from nxd_trainer.doctor.clock import check_clock, read_clock
from nxd_trainer.doctor.collective import check_collective, run_two_ranks
from nxd_trainer.doctor.devices import check_devices, find_devices
from nxd_trainer.doctor.finding import Finding
from nxd_trainer.doctor.folder import check_folder
from nxd_trainer.doctor.import_paths import check_import_name, import_location, own_location
from nxd_trainer.doctor.limits import check_open_files, check_shared_memory, free_shared_memory, open_files_limits
from nxd_trainer.doctor.neuron_environment import check_environment
from nxd_trainer.doctor.ports import check_loopback, check_rendezvous
from nxd_trainer.doctor.versions import (
    check_neuron,
    check_own_packages,
    check_torch,
    check_torch_import,
    check_transformers,
    check_xla,
    installed_versions,
    torch_import_failure,
)
from nxd_trainer.import_name import other_owner


def examine(
    folder: str | Path | None = None, *, try_ranks: bool = True, show_output: Callable[[str], None] | None = None
) -> Iterator[Finding]:
    """Look at this machine; findings come as they are made.

    Args:
        folder: for checkpoints, also as a URL; left out if None.
        try_ranks: start two ranks, which takes some seconds; left out in any case where torch does not work.
        show_output: is given what the two ranks wrote.
    """
    versions = installed_versions()
    torch = check_torch(versions)
    yield torch
    yield check_own_packages(versions)
    yield check_import_name(other_owner(), import_location(), own_location())
    yield check_xla(versions)
    import_of_torch = check_torch_import(torch_import_failure())
    if torch.status == "ok":
        yield import_of_torch
    if torch.status == import_of_torch.status == "ok":
        devices = find_devices()
        yield check_devices(devices)
        yield check_neuron(versions, has_device=devices.neuron > 0)
    yield check_transformers(versions)
    yield from check_environment(os.environ)
    yield check_open_files(*open_files_limits())
    yield check_shared_memory(free_shared_memory())
    yield check_clock(*read_clock())
    yield check_rendezvous(os.environ)
    yield check_loopback()
    if folder is not None:
        yield check_folder(folder)
    if try_ranks and torch.status == import_of_torch.status == "ok":
        code, output = run_two_ranks()
        if show_output is not None:
            show_output(output)
        yield check_collective(code, output)
