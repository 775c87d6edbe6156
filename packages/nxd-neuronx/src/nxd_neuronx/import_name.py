"""The import name `neuronx_distributed`, which another distribution may own as well."""

import warnings
from importlib import metadata

OTHER_OWNER = "neuronx-distributed"


def other_owner() -> str | None:
    """Name and version of the other distribution that owns `neuronx_distributed`, if it is installed.

    Asks for one distribution by name, which costs a fraction of a millisecond.
    """
    try:
        return f"{OTHER_OWNER} {metadata.version(OTHER_OWNER)}"
    except metadata.PackageNotFoundError:
        return None


def warn_of_other_owner() -> None:
    """Warn if both are installed: their files are in one folder, where the last to be installed has won."""
    other = other_owner()
    if other is not None:
        warnings.warn(
            f"{other} is installed next to nxd-neuronx, and both own the import name neuronx_distributed: which one "
            f"is imported depends on the order of installation. {how_to_part_them()}",
            RuntimeWarning,
            stacklevel=3,
        )


def how_to_part_them() -> str:
    """Advice on how to keep only one of the two distributions."""
    return (
        f"Keep one of them in an environment: pip uninstall {OTHER_OWNER} && pip install --force-reinstall --no-deps "
        "nxd-neuronx"
    )
