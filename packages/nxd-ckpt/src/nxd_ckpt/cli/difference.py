"""`nxd-ckpt diff` compares two checkpoints of any formats."""

import math
from typing import Any

import numpy as np
import torch

from nxd_ckpt.cli.formats import Opened, Place, boxes_to_read, opened
from nxd_ckpt.cli.report import EXIT_DIFFERENT, EXIT_GOOD, Report, progress_bar
from nxd_ckpt.errors import LISTED, by_prefix, printable
from nxd_ckpt.interop.source import Selection, TensorSource, num_bytes, read_box, same_bits


def diff(
    first: Place, second: Place, *, rtol: float | None, atol: float | None, include: list[str], exclude: list[str]
) -> Report:
    """Compare names, shapes, dtypes and values: bit by bit, or with a tolerance, in which case dtypes may differ.

    Tensors are compared in parts of 16 MiB, or whole if a format cannot be read in parts.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    tolerance = None if rtol is None and atol is None else (rtol or 0.0, atol or 0.0)
    with opened(first) as a, opened(second) as b:
        sources = [Selection(found.source, tuple(include), tuple(exclude)) for found in (a, b)]
        only_first = [name for name in sources[0].tensors if name not in sources[1].tensors]
        only_second = [name for name in sources[1].tensors if name not in sources[0].tensors]
        common = [name for name in sources[0].tensors if name in sources[1].tensors]
        whole = not (a.reads_parts and b.reads_parts)
        differing: dict[str, Any] = {}
        with progress_bar("diff", sum(num_bytes(sources[0].tensors[name]) for name in common)) as advance:
            for name in common:
                difference = _compare(name, sources[0], sources[1], tolerance, whole=whole)
                if difference is not None:
                    differing[name] = difference
                advance(name, num_bytes(sources[0].tensors[name]))
    data = {
        "equal": not (only_first or only_second or differing),
        "compared": len(common),
        "only_in_first": only_first,
        "only_in_second": only_second,
        "different": differing,
    }
    lines = [f"first: {_named(first, a)}; second: {_named(second, b)}"]
    lines += [*_only_in("first", only_first), *_only_in("second", only_second)]
    lines += [f"{printable(name)}: {_describe(difference)}" for name, difference in differing.items()]
    how = "bit by bit" if tolerance is None else f"within rtol={tolerance[0]:g}, atol={tolerance[1]:g}"
    lines.append(f"{len(common) - len(differing)} of {len(common)} common tensors are equal {how}")
    return Report(data, lines, EXIT_GOOD if data["equal"] else EXIT_DIFFERENT)


def _only_in(side: str, names: list[str]) -> list[str]:
    """Return a line for each name, or one for many that begin alike; `--json` has all of them."""
    lines = []
    for pattern, group in by_prefix(names).items():
        if len(group) > LISTED:
            some = ", ".join(group[:2])
            lines.append(f"only in the {side}: {len(group)} tensors {printable(pattern)}, such as {printable(some)}")
        else:
            lines += [f"only in the {side}: {printable(name)}" for name in group]
    return lines


def _named(place: Place, found: Opened) -> str:
    return printable(place.path) if found.checkpoint is None else f"{printable(place.path)}, {found.checkpoint.tag}"


def _compare(
    name: str, first: TensorSource, second: TensorSource, tolerance: tuple[float, float] | None, *, whole: bool
) -> dict[str, Any] | None:
    a_info, b_info = first.tensors[name], second.tensors[name]
    if a_info.global_shape != b_info.global_shape:
        return {"shapes": [list(a_info.global_shape), list(b_info.global_shape)]}
    if tolerance is None and a_info.dtype != b_info.dtype:
        return {"dtypes": [str(a_info.dtype), str(b_info.dtype)]}
    elements, largest, largest_relative = 0, math.nan, math.nan
    for box in boxes_to_read(a_info, whole=whole):
        a, b = read_box(first, name, box), read_box(second, name, box)
        if same_bits(a, b):
            continue
        gaps = _gaps(a, b)
        far = _differ_in_bits(a, b).reshape(a.shape) if tolerance is None else _are_far(a, b, gaps, *tolerance)
        elements += int(far.sum())
        largest = _larger(largest, gaps)
        largest_relative = _larger(largest_relative, _relative(gaps, a, b))
    if not elements:
        return None
    return {
        "elements": elements,
        "of": math.prod(a_info.global_shape),
        "largest_gap": _number(largest),
        "largest_relative_gap": _number(largest_relative),
    }


def _larger(so_far: float, values: torch.Tensor) -> float:
    """Return the larger of the maximum so far and these values, ignoring NaN, which is not a distance."""
    values = values[~values.isnan()]
    return so_far if not values.numel() else max(float(values.max()), -math.inf if math.isnan(so_far) else so_far)


def _relative(gaps: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Divide gaps by the larger of the two magnitudes; the result is from 0 to 2."""
    return torch.where(gaps == 0, 0.0, gaps / torch.maximum(_widened(a).abs(), _widened(b).abs()))


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _differ_in_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    by_element = (tensor.reshape(-1, 1).view(torch.uint8) for tensor in (a, b))
    return torch.ne(*by_element).any(dim=1)


def _are_far(a: torch.Tensor, b: torch.Tensor, gaps: torch.Tensor, rtol: float, atol: float) -> torch.Tensor:
    """Mark elements outside the tolerance. An infinity is close only to itself, and NaN only to NaN."""
    a, b = _widened(a), _widened(b)
    alike = (a == b) & (gaps == 0) | a.isnan() & b.isnan() | a.isinf() & (a == b)
    return ~(alike | (gaps <= atol + rtol * b.abs()) & b.isfinite())


def _gaps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return each element's distance as float64; a distance of integers of one dtype is never rounded to 0."""
    if a.dtype == b.dtype and not (a.is_floating_point() or a.is_complex()):
        x, y = (tensor.reshape(-1).view(_STANDS_FOR_BOOL.get(tensor.dtype, tensor.dtype)).numpy() for tensor in (a, b))
        distance = np.maximum(x, y) - np.minimum(x, y)  # signed integers may overflow; the view as unsigned is right
        return torch.from_numpy(distance.view(f"u{distance.itemsize}").astype(np.float64)).reshape(a.shape)
    return (_widened(a) - _widened(b)).abs()


_STANDS_FOR_BOOL = {torch.bool: torch.uint8}


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _describe(difference: dict[str, Any]) -> str:
    if "elements" not in difference:
        (what, (a, b)), *_ = difference.items()
        return f"{what} differ: {a} and {b}"
    gap, relative = difference["largest_gap"], difference["largest_relative_gap"]
    return (
        f"{difference['elements']} of {difference['of']} elements differ, by at most {gap}, at most {relative:.3g} "
        "relative to the larger value"
        if isinstance(relative, float)
        else f"{difference['elements']} of {difference['of']} elements differ, by at most {gap}"
    )
