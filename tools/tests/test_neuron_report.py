"""The report for instances with Neuron devices; without one it runs on torch-xla's CPU client, and says so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import neuron_report
import pytest
from neuron_report import NUM_STEPS, Report, Run, render
from nxd_state import initialize_model_parallel

CPU = Run("cpu", 1, {}, [5.0] * NUM_STEPS, [], [], {}, [0.5] * NUM_STEPS, {})
DEVICE = Run(
    device="xla (NEURON)",
    world_size=2,
    collectives={"all_reduce": True, "all_to_all": True},
    losses=[5.001] * NUM_STEPS,
    graphs=[1] * NUM_STEPS,
    compilations=[1, 1] + [0] * (NUM_STEPS - 2),
    fallbacks={},
    seconds=[60.0, 50.0] + [0.25] * (NUM_STEPS - 2),
    memory={"bytes_used": 1000},
)


def report(**changes: Any) -> Report:
    return Report(True, {"torch": "2.9.1"}, Run(**vars(DEVICE) | changes), CPU)


def test_report_of_a_right_run_has_no_no() -> None:
    text = render(report())

    assert all(report().findings().values())
    assert "**NO**" not in text
    assert "- yes: all_to_all is right" in text
    assert "| 1 | 5.001000 | 5.000000 | 1 | 60.000 |" in text
    assert "2 compilations, 250.0 ms a step after the second" in text
    assert "one process on the CPU takes 2.00 times as long" in text
    assert "device memory, bytes_used: 1,000" in text


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"collectives": {"all_gather": False}}, "all_gather is right"),
        ({"losses": [5.0] * (NUM_STEPS - 1) + [5.1]}, "losses are the CPU's within 1%"),
        ({"graphs": [1] * (NUM_STEPS - 1) + [2]}, "a step is one graph"),
        ({"compilations": [1, 1, 0, 1, 0, 0]}, "nothing is compiled after the second step"),
        ({"fallbacks": {"aten::sort": 3}}, "no operation falls back to the CPU"),
    ],
)
def test_report_says_what_does_not_hold(changes: dict[str, Any], finding: str) -> None:
    wrong = report(**changes)

    assert [name for name, holds in wrong.findings().items() if not holds] == [finding]
    assert f"**NO**: {finding}" in render(wrong)


def collectives_of_all_ranks() -> dict[str, bool]:
    initialize_model_parallel(2)
    return neuron_report.try_collectives()


def test_collectives_are_held_against_known_results(run_ranks: Callable[..., list[Any]]) -> None:
    for right in run_ranks(collectives_of_all_ranks, 2):
        assert right == dict.fromkeys(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"], True)


@pytest.mark.skipif(Path("/dev/neuron0").exists(), reason="there is a device")
def test_several_ranks_without_devices_are_refused() -> None:
    with pytest.raises(SystemExit, match="--ranks 4: without Neuron devices only one rank runs"):
        neuron_report.make_report(4)


@pytest.mark.xla
@pytest.mark.neuron
def test_whole_report_is_made_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "report.md", tmp_path / "report.json"]
    monkeypatch.setattr("sys.argv", ["neuron_report.py", "--output", str(files[0]), "--json", str(files[1])])

    assert neuron_report.main() == 0

    found = json.loads(files[1].read_text())
    has_device = Path("/dev/neuron0").exists()
    assert found["device_run"]["device"] == ("xla (NEURON)" if has_device else "xla (CPU)")
    assert ("No Neuron device here" in files[0].read_text()) != has_device
    assert all(found["findings"].values())
