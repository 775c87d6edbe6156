"""Which Neuron hardware a script is for, as far as scripts ask."""

import json
import os
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

_TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
_LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"


class hardware(Enum):  # noqa: N801  (the documented name)
    """Generations of Neuron devices; `hardware("inf2")` gives that of an instance type."""

    TRN1 = "trn1"
    TRN2 = "trn2"
    TRN3 = "trn3"
    CUSTOM = "custom"

    @classmethod
    def _missing_(cls, value: object) -> "hardware | None":
        if value in ("trn1n", "inf2"):
            return cls.TRN1
        return cls.CUSTOM if value is not None and value == os.environ.get(_TARGET_VARIABLE) else None


class HloMetadataLevel(Enum):
    """How much of the source code the old compiler's programs named; True and False are its older spellings."""

    DEBUG = "debug"
    INFO = "info"
    NONE = "none"

    @classmethod
    def _missing_(cls, value: object) -> "HloMetadataLevel | None":
        return {True: cls.DEBUG, False: cls.INFO}.get(value) if isinstance(value, bool) else None


class LogicalNCConfig(IntEnum):
    """Physical NeuronCores that make one logical core."""

    LNC_1 = 1
    LNC_2 = 2


def get_platform_target() -> str:
    """The generation that `NEURON_PLATFORM_TARGET_OVERRIDE` names; "trn1" otherwise."""
    return os.environ.get(_TARGET_VARIABLE) or hardware.TRN1.value


def get_platform_lnc() -> LogicalNCConfig:
    """As `NEURON_LOGICAL_NC_CONFIG` says; else 2 if the platform is said to be trn2 or trn3, else 1.

    Raises:
        ValueError: the variable is neither 1 nor 2.
    """
    said = os.environ.get(_LNC_VARIABLE)
    if said is None or said == "-1":
        return LogicalNCConfig(2 if os.environ.get(_TARGET_VARIABLE) in ("trn2", "trn3") else 1)
    if said not in ("1", "2"):
        raise ValueError(f"{_LNC_VARIABLE}={said!r} is not a logical core size; set it to 1 or 2")
    return LogicalNCConfig(int(said))


def get_dict_from_json(json_file: str | os.PathLike[str]) -> dict[Any, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: there is no such file, or it is not JSON.
    """
    try:
        found: dict[Any, Any] = json.loads(Path(json_file).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"JSON file not found at '{json_file}': {error}") from error
    except ValueError as error:  # of json and of decoding
        raise ValueError(f"Failed to parse JSON file '{json_file}': {error}") from error
    return found
