"""The packages ask devices for traits: which files name a type of device, and that there are no more of them.

Named is an accelerator where its name stands in the code by itself ("cuda", "xla:0", `torch.cuda`, `.is_xla`), where
the library of one is imported, and the CPU where a device's type is compared with it. Not counted: docstrings and
messages, host memory asked for (`device="cpu"`, `.cpu()`, `.is_cpu`), names of distributions, and what gives a name to
another device: the stand-ins that `nxd_testing` makes for tests, and those for scripts of torch-xla.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"
ACCELERATORS = "cuda|xla|neuron|mps|xpu|hpu|privateuseone"
LIBRARIES = re.compile(r"torch_(xla|neuronx)(\.|$)")
STAND_INS = ("nxd_testing/", "nxd_neuronx/xla_stand_in.py", "nxd_neuronx/neuron_stand_in.py")
KNOWN = {
    "nxd_state/device.py": "the one that knows devices",
    "nxd_state/neuron.py": "the environment of torch-xla's processes on Neuron devices",
    "nxd_trace/compilers/neuronx.py": "runs torch-neuronx's tracer, which comes with torch-xla",
    "nxd_doctor/installation.py": "tells a user which devices a host has",
    "nxd_doctor/recording.py": "runs programs on torch-xla to record their graphs",
}


def names_in(source: str) -> list[str]:
    """Each place that names a device, as "line: what"."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    nodes = [node for node in ast.walk(tree) if id(node) not in docstrings]
    return [f"{getattr(node, 'lineno', 0)}: {what}" for node in nodes for what in named_by(node)]


def named_by(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)) if re.fullmatch(rf"({ACCELERATORS})(:\d+)?|nccl", text):
            yield text
        case ast.Constant(value=str(text)) if text in ("torch_xla", "torch_neuronx"):
            yield text
        case ast.Attribute(value=ast.Name("torch"), attr=attribute) if re.fullmatch(ACCELERATORS, attribute):
            yield f"torch.{attribute}"
        case ast.Attribute(attr=attribute) if re.fullmatch(rf"is_({ACCELERATORS})", attribute):
            yield f".{attribute}"
        case ast.Import(names=names):
            yield from (name.name for name in names if LIBRARIES.match(name.name))
        case ast.ImportFrom(module=str(module)) if LIBRARIES.match(module):
            yield module
        case ast.Compare(left=left, comparators=others):
            operands = [ast.unparse(operand) for operand in (left, *others)]
            if any("'cpu'" in text for text in operands) and any(
                text.endswith((".type", "device_type()", "kind")) for text in operands
            ):
                yield "cpu"


def test_types_of_devices_are_named_in_five_files_at_most() -> None:
    found = {
        path.as_posix().rpartition("/src/")[2]: names
        for path in sorted(PACKAGES.glob("*/src/**/*.py"))
        if not any(it in path.as_posix() for it in STAND_INS)
        if (names := names_in(path.read_text(encoding="utf-8")))
    }

    assert {path: names for path, names in found.items() if path not in KNOWN} == {}
    assert found.keys() == KNOWN.keys(), "a file that names none any more must leave the list"
    assert len(KNOWN) <= 5


@pytest.mark.parametrize(
    "line",
    [
        'device = torch.device("cuda")',
        'move(model, "xla:0")',
        "torch.cuda.synchronize()",
        "if tensor.is_cuda: pass",
        "import torch_xla.core.xla_model",
        "from torch_xla import runtime",
        'importlib.import_module("torch_neuronx")',
        'if tensor.device.type == "cpu": pass',
        'if device_type() != "cpu": pass',
        'dist.init_process_group("nccl")',
    ],
)
def test_place_that_names_a_device_is_counted(line: str) -> None:
    assert names_in(f"if True:\n    {line}\n") != []


@pytest.mark.parametrize(
    "line",
    [
        '"""On cuda and on "xla"."""',
        'torch.empty(3, device="cpu")',
        'tensor.to("cpu")',
        "if tensor.is_cpu: pass",
        'raise ValueError("NXD_DEVICE=cuda, but torch sees none")',
        'installed = versions["torch-xla"]',
    ],
)
def test_place_that_asks_for_host_memory_is_not_counted(line: str) -> None:
    assert names_in(f"if True:\n    {line}\n") == []
