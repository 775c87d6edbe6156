"""The dtypes that a checkpoint can hold, and their names in the safetensors format.

Scales and pairs of 4-bit numbers are never converted to another dtype. An element of "F4" is such a pair, as in torch.
"C128" is our own name.
"""

import torch

CODE_OF_DTYPE: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.complex128: "C128",
}
# Dtypes of quantized models, which only newer versions of torch have.
_NEWER = {"float8_e8m0fnu": "F8_E8M0", "float4_e2m1fn_x2": "F4"}
CODE_OF_DTYPE |= {getattr(torch, name): code for name, code in _NEWER.items() if hasattr(torch, name)}
DTYPE_OF_CODE: dict[str, torch.dtype] = {code: dtype for dtype, code in CODE_OF_DTYPE.items()}
OPAQUE = frozenset({"F8_E8M0", "F4"})


def in_safetensors(code: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape for the header of a safetensors file, which counts the numbers in a pair."""
    if code == "C128":
        return "F64", (*shape, 2)
    if code == "F4":
        return (code, (*shape[:-1], 2 * shape[-1])) if shape else ("U8", shape)
    return code, shape
