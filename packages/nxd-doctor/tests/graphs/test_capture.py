"""Graphs that torch-xla runs, recorded. Each program is a process of its own, since torch-xla decides once."""

import json
import os
import subprocess
import sys

import pytest
from nxd_doctor.graphs import capture_steps, module_scopes, read_counters
from nxd_testing import deadline

xla = pytest.mark.xla
neuron = pytest.mark.neuron

MODEL = """
import json
import torch
from nxd_state import get_device
from nxd_state.neuron_errors import DeviceError, device_errors
from nxd_doctor.graphs import *
from nxd_doctor.graphs.capture import record_steps
start_capture()
import torch_xla

class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

model = torch.nn.Sequential(Mlp(), Mlp()).to(get_device())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(rows=4, look=False):
    loss = model(torch.ones(rows, 8).to(get_device())).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if look:
        loss.item()
    torch_xla.sync()
"""

FINDINGS = """
before = read_counters()
steps = capture_steps(step, 4)
counted = read_counters() - before
looked_at = capture_steps(lambda: step(look=True))[0]
longer = capture_steps(lambda: step(rows=5))[0]
with module_scopes(model):
    named = capture_steps(step)[0]
def operations(graph):  # but for their order, and views
    found = [(it.opcode, str(it.shape)) for it in graph.module.main.instructions if it.opcode != "transpose"]
    return sorted(found), count_flops(graph.module)

recorded = record_steps(step, 2)
try:
    record_steps(lambda: step(look=True))
except RuntimeError as error:
    early_read = str(error)
print(json.dumps({
    "recorded": [len(graphs) for graphs in recorded],
    "recorded has the operations": operations(steps[3][0]) == operations(recorded[1][0]),
    "early read": early_read,
    "graphs": [len(graphs) for graphs in steps],
    "difference of steps": str(first_difference(steps[1][0].module, steps[3][0].module)),
    "executions": counted.executions,
    "compilations": counted.compilations,
    "transfers": counted.transfers_to_host,
    "fallbacks": counted.fallbacks,
    "looked at": [graph.asked_by for graph in looked_at],
    "difference of rows": str(first_difference(steps[3][0].module, longer[0].module)),
    "difference of names": str(first_difference(steps[3][0].module, named[0].module)),
    "places": [product.place for product in find_products(named[0].module)],
}))
"""


def run(program: str) -> list[str]:
    """The lines that a program prints."""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"NXD_DEVICE": "xla"},
        capture_output=True,
        text=True,
        timeout=deadline(300),
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def findings():
    [line] = run(MODEL + FINDINGS)
    return json.loads(line)


@xla
@neuron
def test_steps_are_one_graph_each_and_the_same_after_the_first(findings):
    assert findings["graphs"] == [1, 1, 1, 1]
    assert findings["difference of steps"] == "None"
    assert findings["executions"] == 4
    assert findings["compilations"] <= 2
    assert (findings["transfers"], findings["fallbacks"]) == (0, {})


@xla
@neuron
def test_value_that_is_looked_at_splits_the_step_and_its_line_is_told(findings):
    assert [asked_by.split(" ")[0] for asked_by in findings["looked at"]] == ["step", "step"]
    assert len(set(findings["looked at"])) == 2


@xla
@neuron
def test_new_shape_is_told_as_the_reason_of_a_compilation(findings):
    assert "is f32[4,8] in the first and f32[5,8] in the second" in findings["difference of rows"]


@xla
@neuron
def test_forward_and_backward_carry_the_modules_paths_without_changing_the_graph(findings):
    layers = ["0.up", "0.down", "1.up", "1.down"]

    assert findings["difference of names"] == "None"
    # Three products for each linear layer, except that the first input needs no gradient.
    assert sorted(findings["places"]) == sorted(layers + layers + layers[1:])


@xla
@neuron
def test_steps_that_are_not_run_have_the_operations_of_those_that_are(findings):
    assert findings["recorded"] == [1, 1]
    assert findings["recorded has the operations"]


@xla
@neuron
def test_value_that_is_read_in_a_step_that_is_not_run_is_refused_with_its_line(findings):
    assert findings["early read"].startswith("the step reads a value before its end, which splits its graph: step (")


@xla
def test_capture_that_comes_too_late_is_refused():
    late = MODEL.replace("start_capture()\n", "") + "step()\n"

    lines = run(
        late
        + """
try:
    capture_steps(step)
except RuntimeError as error:
    print(error)
"""
    )

    assert "none recorded" in lines[0]
    assert "call nxd_doctor.graphs.start_capture() before" in lines[0]


@xla
def test_lack_of_device_memory_is_told_with_the_module():
    lines = run(
        MODEL
        + """
class Outer(torch.nn.Module):
    def forward(self, x):
        return (x[:, None] * x[None, :]).sin()
outer = torch.nn.Sequential(Outer())
x = torch.ones(3_000_000, device=get_device())
try:
    with module_scopes(outer), device_errors():
        result = outer(x)
        torch_xla.sync()
        result[0, 0].item()
except DeviceError as error:
    print(error)
"""
    )

    assert lines[0] == "the device ran out of memory"
    assert "f32[3000000,3000000] of 0 (36,000,000,000,000 bytes)" in lines[1]


@pytest.mark.parametrize(
    "call", [lambda: capture_steps(lambda: None), read_counters, lambda: module_scopes(None).__enter__()]
)
def test_without_torch_xla_the_error_says_what_to_install(call, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ModuleNotFoundError, match="install torch_xla of the same version as torch"):
        call()
