"""HLO texts: two that XLA printed, and a way to write small ones."""

from pathlib import Path

import pytest
from nxd_doctor.graphs import HloModule, parse_hlo

DATA = Path(__file__).parent / "data"


@pytest.fixture
def torch_xla_step() -> str:
    """As torch-xla dumps it, with module scopes: a step of `Sequential(Mlp(8 -> 16 -> 8))` without biases on 5 rows.

    Under bfloat16 autocast, with SGD; the loss is a mean of squares.
    """
    return (DATA / "torch_xla_step.hlo").read_text()


@pytest.fixture
def compiled_step() -> str:
    """As XLA's CPU compiler leaves it: loss and gradients of Linear(8, 16), GELU, Linear(16, 4) on 5 rows, float32."""
    return (DATA / "compiled_step.hlo").read_text()


@pytest.fixture
def module_of():
    """`module_of("p = f32[8] parameter(0)", ...)`: a module whose entry has these lines, the last of them its root.

    `before` are whole computations, `header` goes into the first line.
    """

    def make(*lines: str, before: str = "", header: str = "") -> HloModule:
        body = "\n".join(f"  {line}" for line in (*lines[:-1], f"ROOT {lines[-1]}"))
        return parse_hlo(f"HloModule test{header and ', '}{header}\n\n{before}\n\nENTRY main {{\n{body}\n}}\n")

    return make
