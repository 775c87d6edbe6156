"""Copies of a split model by `copy.deepcopy`, such as a reference model or an average of weights.

torch copies a parameter without its attributes, and so would make of a part something whole.
"""

import copy
from functools import partial
from typing import Any

from nxd_state import copy_parameter_attributes
from torch import nn

_PICKLE_PROTOCOL = 4


def keep_marks_in_copies(model: nn.Module) -> None:
    """Have a deep copy of the model say of its parameters what they say themselves."""
    model.__deepcopy__ = partial(_copied, model)  # type: ignore[assignment]


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    # What copy.deepcopy does where there is no __deepcopy__.
    parts: Any = model.__reduce_ex__(_PICKLE_PROTOCOL)
    make, args, state, *_ = parts
    made: nn.Module = make(*args)
    memo[id(model)] = made
    made.__setstate__(copy.deepcopy(state, memo))
    for parameter in model.parameters():
        copy_parameter_attributes(parameter, memo[id(parameter)])
    return made
