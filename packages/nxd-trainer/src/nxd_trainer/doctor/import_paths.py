"""Who answers to `import neuronx_distributed`."""

import importlib.util
from pathlib import Path

import nxd_trainer
from nxd_trainer.doctor.finding import Finding, ok, wrong
from nxd_trainer.import_name import how_to_part_them


def import_location() -> Path | None:
    """The folder that `import neuronx_distributed` takes; None if there is none."""
    spec = importlib.util.find_spec("neuronx_distributed")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def own_location() -> Path:
    """The folder in which our package of that name lies: beside nxd_trainer."""
    return Path(nxd_trainer.__file__).parents[1] / "neuronx_distributed"


def check_import_name(other: str | None, found: Path | None, own: Path) -> Finding:
    """Whether the import name leads to us, and to nobody else.

    Args:
        other: name and version of the other distribution that owns it, if it is installed.
        found: what is imported.
        own: what should be.
    """
    name = "import neuronx_distributed"
    if other is not None:
        return wrong(name, f"{other} owns this name, too; imported from {found}", how_to_part_them())
    if found != own:
        mend = f"take what lies there off the import path, or run where {own} comes first"
        return wrong(name, f"imported from {found}, not from nxd-trainer", mend)
    return ok(name, "is nxd-trainer's")
