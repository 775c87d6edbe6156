"""A rank's next operation, as one word that its peers compare with their own, and as the text of an error.

64 bits: operation (4), reduction (3), dtype (6), root (7), number of elements (44).
"""

import torch

OPERATIONS = ("", "barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send to recv")
_REDUCTIONS = ("", "sum", "avg", "max", "min")
# fmt: off
_DTYPE_NAMES = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32", "complex64",
    "complex128", "bool", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "uint16", "uint32", "uint64", "float4_e2m1fn_x2",
)
# fmt: on
_NUMEL_BITS, _ROOT_BITS, _DTYPE_BITS, _REDUCTION_BITS = 44, 7, 6, 3
_ROOT_AT = _NUMEL_BITS
_DTYPE_AT = _ROOT_AT + _ROOT_BITS
_REDUCTION_AT = _DTYPE_AT + _DTYPE_BITS
_OPERATION_AT = _REDUCTION_AT + _REDUCTION_BITS

_OPERATION_CODES = {name: code << _OPERATION_AT for code, name in enumerate(OPERATIONS)}
_REDUCTION_CODES = {name: code << _REDUCTION_AT for code, name in enumerate(_REDUCTIONS)}
_DTYPE_CODES = {
    getattr(torch, name): code << _DTYPE_AT for code, name in enumerate(_DTYPE_NAMES, 1) if hasattr(torch, name)
}


def encode(operation: str, numel: int = 0, dtype: torch.dtype | None = None, reduction: str = "", root: int = 0) -> int:
    """One word for one collective; dtypes too new to be known here are not told apart."""
    code = _OPERATION_CODES[operation] | _REDUCTION_CODES[reduction] | root << _ROOT_AT | numel
    return code | _DTYPE_CODES.get(dtype, 0) if dtype is not None else code


def describe(word: int) -> str:
    """`all_reduce(op=sum) of 4 x float32`."""
    operation = OPERATIONS[word >> _OPERATION_AT]
    reduction = _REDUCTIONS[word >> _REDUCTION_AT & (1 << _REDUCTION_BITS) - 1]
    dtype = word >> _DTYPE_AT & (1 << _DTYPE_BITS) - 1
    root = word >> _ROOT_AT & (1 << _ROOT_BITS) - 1
    numel = word & (1 << _NUMEL_BITS) - 1
    details = f"(op={reduction})" if reduction else f"(source={root})" if operation == "broadcast" else ""
    return f"{operation}{details}" + (f" of {numel} x {_DTYPE_NAMES[dtype - 1]}" if dtype else "")
