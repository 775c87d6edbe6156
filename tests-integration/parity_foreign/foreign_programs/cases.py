"""The cases of a table of layouts or faults: each in three precisions, and quick in few of them."""

from collections.abc import Collection, Iterable, Mapping

import pytest
import torch

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}

Case = tuple[str, str]  # a name of the table, and that of a dtype


def cases(of: Iterable[str], quick: Collection[Case], known: Mapping[Case, str] | None = None) -> list:
    """Return all pairs of a name and a dtype as parameters; those that are not quick are slow.

    Args:
        of: the names.
        quick: the pairs that are quick.
        known: the pairs that nxd-parity gets wrong, and how.
    """
    return [
        pytest.param(name, dtype, id=f"{name}-{of_dtype}", marks=_marks((name, of_dtype), quick, known or {}))
        for name in of
        for of_dtype, dtype in DTYPES.items()
    ]


def _marks(case: Case, quick: Collection[Case], known: Mapping[Case, str]) -> list[pytest.MarkDecorator]:
    marks = [] if case in quick else [pytest.mark.slow]
    return [*marks, pytest.mark.xfail(reason=known[case], strict=False)] if case in known else marks
