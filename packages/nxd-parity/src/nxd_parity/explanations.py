"""Simple changes of the expected values that give those that were found: what two tensors alone tell."""

import math

import torch
from torch import Tensor

from nxd_parity import report as of_faults
from nxd_parity.activations import scale_of
from nxd_parity.bounds import Bound, distance
from nxd_parity.outcome import Diagnosis
from nxd_parity.report import runs

LOWER = (torch.float32, torch.bfloat16, torch.float16)
LEAST_ROUNDED, MOST_ONE_SIDED = 24, 0.5  # elements that tell, and how far rounding is from going both ways alike
TYPICAL = 0.2  # of a dtype's last place: the root mean square of what its rounding changes
LEAST_CLASSES = 8  # of which two elements are few


def masked(expected: Tensor, found: Tensor, bound: Bound) -> Diagnosis | None:
    """Explain zeros in other places: whole rows are dropped tokens, single elements are another dropout mask."""
    if not found.dim():
        return None
    rows_found, rows_expected = found.reshape(-1, found.shape[-1]), expected.reshape(-1, expected.shape[-1])
    is_zero, was_zero = (rows_found == 0).all(1), (rows_expected == 0).all(1)
    lost, same = is_zero & ~was_zero, ~is_zero & ~was_zero
    if bool(is_zero.all()) and bool(lost.any()):
        return Diagnosis(of_faults.DROPPED_TOKENS, "all values are zero")
    if bool(lost.any()) and bool(same.any()) and bound.holds(distance(rows_expected[same], rows_found[same])):
        return Diagnosis(of_faults.DROPPED_TOKENS, f"{int(lost.sum())} of {len(lost)} rows are zero")
    zero_found, zero_expected = found == 0, expected == 0
    both = ~zero_found & ~zero_expected
    if bool((zero_found != zero_expected).any()) and bool(both.any()):
        share = float(zero_found.double().mean()), float(zero_expected.double().mean())
        if min(share) > 0.01 and bound.holds(distance(expected[both], found[both])):
            return Diagnosis(of_faults.RANDOM_NUMBERS, "other elements are zero: another mask")
    return None


def has_other_rows(expected: Tensor, found: Tensor) -> bool:
    """Whether rows that should be zero are not."""
    return bool(((expected == 0).all(-1) & (found != 0).any(-1)).any())


def other_targets(expected: Tensor, found: Tensor, bound: Bound) -> Diagnosis | None:
    """Explain the gradient of logits, [..., classes]: another label raises one element of a row and lowers another."""
    if found.dim() < 2 or found.shape[-1] < LEAST_CLASSES:
        return None
    wanted, got = expected.double(), found.double()
    ratios = (got / wanted)[wanted.abs() > bound.largest]
    factor = ratios.median() if ratios.numel() and ratios.median() > 0 else 1.0  # another number of labels counts
    apart = (wanted * factor - got).reshape(-1, found.shape[-1])
    apart = torch.where(apart.abs() > bound.largest, apart, torch.zeros_like(apart))
    rows = int((apart != 0).any(1).sum())
    is_pair = ((apart != 0).sum(1) == 2) & (4 * apart.sum(1).abs() <= apart.abs().amax(1))
    of_rows = got.reshape(apart.shape), wanted.reshape(apart.shape)
    is_without = ((of_rows[0] == 0).all(1) != (of_rows[1] == 0).all(1)) & bool(is_pair.any())
    if not rows or 2 * int((is_pair | is_without).sum()) <= rows:
        return None
    what = f"{rows} of {len(apart)} rows differ, most of them in two elements, as with other labels"
    return Diagnosis(of_faults.DIFFERENT_DATA, what)


def lost_targets(expected: Tensor, found: Tensor, bound: Bound) -> Diagnosis | None:
    """Explain the gradient of logits, [..., classes]: rows without a label have none, and the others count more."""
    if found.dim() < 2:
        return None
    wanted, got = (it.double().reshape(-1, it.shape[-1]) for it in (expected, found))
    is_lost, is_kept = ((got == 0).all(1) & (wanted != 0).any(1)), (got != 0).any(1)
    factor, _ = scale_of(wanted[is_kept], got[is_kept]) if bool(is_kept.any()) else (0.0, 0.0)
    if not bool(is_lost.any()) or factor <= 0 or not bound.holds(distance(wanted[is_kept] * factor, got[is_kept])):
        return None
    what = f"{int(is_lost.sum())} of {len(got)} rows have no gradient, the others {factor:.4g} times the expected one"
    return Diagnosis(of_faults.DROPPED_TOKENS, what)


def scaled_by_row(expected: Tensor, found: Tensor, bound: Bound) -> Diagnosis | None:
    """Explain the gradient of an output: each row has a factor of its own, as where a mean counts rows differently."""
    if found.dim() < 2:
        return None
    wanted, got = (it.double().reshape(-1, it.shape[-1]) for it in (expected, found))
    sizes = wanted.square().sum(1)
    factors = torch.where(sizes > 0, (wanted * got).sum(1) / sizes.clamp_min(1e-300), torch.ones_like(sizes))
    if not bound.holds(distance(wanted * factors[:, None], got)):
        return None
    known = factors[sizes > sizes.max() / 100]
    low, high = float(known.min()), float(known.max())
    if low <= 0 or high - low < 0.01 * high:
        return None
    return Diagnosis(of_faults.WRONG_AVERAGING, f"rows have factors from {low:.4g} to {high:.4g}")


def rounded(expected: Tensor, found: Tensor) -> Diagnosis | None:
    """Explain a difference as rounding to a smaller dtype: that of the values, or of which rounding is as large."""
    if not found.dtype.is_floating_point or _is_one_sided(expected, found):
        return None
    apart, size = distance(expected, found), float(expected.double().square().mean().sqrt())
    relative = apart.mean_square / size if size else float("inf")
    fitting = []
    for dtype in LOWER:
        last_place = torch.finfo(dtype).eps
        is_lower = last_place > torch.finfo(found.dtype).eps and last_place / 64 <= relative <= last_place
        if is_lower and found.dim() and _is_rounded_to(dtype, expected, found):
            fitting.append(dtype)
    if not fitting:
        return None
    nearest = min(fitting, key=lambda it: abs(math.log(relative / (TYPICAL * torch.finfo(it).eps))))
    dtype = next((it for it in fitting if _has_values_of(it, found)), nearest)
    what = f"the values differ by {relative:.1e} of their size, as after rounding to {str(dtype)[6:]}"
    return Diagnosis(of_faults.LOWER_PRECISION, what)


def extent(expected: Tensor, found: Tensor, bound: Bound) -> str:
    """Say which positions differ along a dim, where others agree; empty if some differ along all of them."""
    is_wrong = (expected.double() - found.double()).abs() > bound.largest
    for dim in range(found.dim()):
        others = tuple(it for it in range(found.dim()) if it != dim)
        along = is_wrong.any(others) if others else is_wrong
        if found.dim() > 1 and bool(along.any()) and not bool(along.all()):
            positions = along.nonzero().flatten().tolist()
            what = f"of dim {dim} only positions {runs(positions)} of {len(along)} differ"
            if 0 < dim < found.dim() - 1 and positions == list(range(1, len(along))):
                what += ", as where a first token sees itself alone: scores of attention, or their mask"
            return what
    return ""


def _is_rounded_to(dtype: torch.dtype, expected: Tensor, found: Tensor) -> bool:
    """Whether nearly all values are ones that a smaller dtype has, or differ by a share of themselves."""
    is_share = (expected - found).abs() <= 2 * torch.finfo(dtype).eps * expected.abs()
    return _has_values_of(dtype, found) or bool(is_share.double().mean() > 0.9)


def _has_values_of(dtype: torch.dtype, found: Tensor) -> bool:
    return bool((found.to(dtype).to(found.dtype) == found).double().mean() > 0.9)


def _is_one_sided(expected: Tensor, found: Tensor) -> bool:
    """Whether most values are larger, or smaller, than the expected ones: rounding goes both ways."""
    apart = ((found.double() - expected.double()).sign() * expected.double().sign()).flatten()
    apart = apart[apart != 0]
    return len(apart) >= LEAST_ROUNDED and abs(float(apart.mean())) > MOST_ONE_SIDED
