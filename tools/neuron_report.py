"""A report from an instance with Neuron devices: what these packages do there, for somebody who cannot run there.

    python tools/neuron_report.py                         as many ranks as there are devices, up to 2
    python tools/neuron_report.py --ranks 8 --output report.md --json report.json

It starts torchrun on that many NeuronCores, and one process on the CPU to compare with: collectives against their
known results, the loss of a small Llama at that tensor-parallel degree against the CPU's, graphs and compilations of
each step, seconds a step, memory. Where there is no Neuron device, one rank runs on torch-xla's CPU client instead,
and the report says so. Takes a few minutes, most of them for the first compilation; leaves the two files that are
asked for, and what the compiler keeps in its cache. Ends with 1 if something does not agree.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

NUM_STEPS = 6
LOSS_TOLERANCE = 1e-2  # relative: the device may multiply in bfloat16, as its compiler's --auto-cast says
CACHE_AND_FLAGS = ("NEURON_CC_FLAGS", "NEURON_COMPILE_CACHE_URL", "NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VISIBLE_CORES")


@dataclass(frozen=True)
class Run:
    """What rank 0 of a run measured.

    Attributes:
        device: such as "xla (NEURON)" or "cpu".
        collectives: by name, whether the result is right; empty for one rank.
        losses: of each step.
        graphs: that each step ran; empty on the CPU.
        compilations: during each step; empty on the CPU.
        fallbacks: operations that ran on the CPU although the model is on the device.
        seconds: of each step, the wait for its result included.
        memory: what the device says of its memory; empty where it says nothing.
    """

    device: str
    world_size: int
    collectives: dict[str, bool]
    losses: list[float]
    graphs: list[int]
    compilations: list[int]
    fallbacks: dict[str, int]
    seconds: list[float]
    memory: dict[str, int]


@dataclass(frozen=True)
class Report:
    """All that is told."""

    has_device: bool
    host: dict[str, str]
    device_run: Run
    cpu_run: Run

    @property
    def loss_difference(self) -> float:
        """Largest relative difference of a step's loss from the CPU's."""
        pairs = zip(self.device_run.losses, self.cpu_run.losses, strict=True)
        return max(abs(found - expected) / abs(expected) for found, expected in pairs)

    def findings(self) -> dict[str, bool]:
        """Each thing that should hold, and whether it does."""
        return {
            **{f"{name} is right": right for name, right in self.device_run.collectives.items()},
            f"losses are the CPU's within {LOSS_TOLERANCE:.0%}": self.loss_difference < LOSS_TOLERANCE,
            "a step is one graph": set(self.device_run.graphs) == {1},
            "nothing is compiled after the second step": not any(self.device_run.compilations[2:]),
            "no operation falls back to the CPU": not self.device_run.fallbacks,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, metavar="N", help="NeuronCores to use, a power of 2 up to 8")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as Markdown; else it is printed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements as JSON")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        run_worker(options.worker)
        return 0
    report = make_report(options.ranks)
    text = render(report)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text, encoding="utf-8")
    if options.json is not None:
        options.json.write_text(
            json.dumps(asdict(report) | {"findings": report.findings()}, indent=2), encoding="utf-8"
        )
    return 0 if all(report.findings().values()) else 1


def make_report(ranks: int | None) -> Report:
    """Run on the device and on the CPU.

    Raises:
        SystemExit: a run fails, with what it wrote.
    """
    has_device = Path("/dev/neuron0").exists()
    ranks = (2 if has_device else 1) if ranks is None else ranks
    if ranks > 1 and not has_device:
        raise SystemExit(
            f"--ranks {ranks}: without Neuron devices only one rank runs; torch-xla's CPU client has no peers"
        )
    return Report(
        has_device=has_device,
        host=describe_host(),
        device_run=start_run({"NXD_DEVICE": "xla", "PJRT_DEVICE": "NEURON" if has_device else "CPU"}, ranks),
        cpu_run=start_run({"NXD_DEVICE": "cpu"}, 1),
    )


def start_run(environment: dict[str, str], ranks: int) -> Run:
    """Start this script as a worker on that many ranks, and read what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        command = [sys.executable, *launcher, __file__, "--worker", str(file)]
        result = subprocess.run(
            command,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if result.returncode:
            raise SystemExit(f"the run with {environment} on {ranks} ranks failed:\n{result.stdout}")
        return Run(**json.loads(file.read_text(encoding="utf-8")))


def run_worker(file: Path) -> None:
    """One rank: try the collectives, train, and, on rank 0, write down what was measured."""
    on_device = os.environ["NXD_DEVICE"] == "xla"
    if on_device and os.environ["PJRT_DEVICE"] == "NEURON":
        from nxd_state.neuron import prepare_neuron  # noqa: PLC0415

        prepare_neuron()
    from nxd_doctor.graphs import start_capture  # noqa: PLC0415
    from nxd_state import destroy_model_parallel, device_type, get_world_group, initialize_model_parallel  # noqa: PLC0415

    if on_device:
        start_capture()
    initialize_model_parallel(int(os.environ.get("WORLD_SIZE", "1")))
    group = get_world_group()
    collectives = try_collectives() if group.size > 1 else {}
    steps = train(on_device)
    run = Run(
        device=f"xla ({os.environ['PJRT_DEVICE']})" if on_device else device_type(),
        world_size=group.size,
        collectives=collectives,
        losses=[step.loss for step in steps],
        graphs=[step.graphs for step in steps] if on_device else [],
        compilations=[step.compilations for step in steps] if on_device else [],
        fallbacks={name: count for step in steps for name, count in step.fallbacks.items()},
        seconds=[step.seconds for step in steps],
        memory=device_memory() if on_device else {},
    )
    if group.rank == 0:
        file.write_text(json.dumps(asdict(run)), encoding="utf-8")
    destroy_model_parallel()


def try_collectives() -> dict[str, bool]:
    """Each collective over all ranks, on small whole numbers, whose sums are exact in every type."""
    import torch  # noqa: PLC0415
    from nxd_state import (  # noqa: PLC0415
        all_gather,
        all_reduce,
        all_to_all,
        broadcast,
        get_device,
        get_world_group,
        reduce_scatter,
        step_boundary,
    )

    group = get_world_group()
    size, rank = group.size, group.rank
    rows = [torch.arange(4.0 * size).reshape(2 * size, 2) + 100 * peer for peer in range(size)]
    total = torch.stack(rows).sum(0)
    expected = {
        "all_reduce": total,
        "all_gather": torch.cat(rows),
        "reduce_scatter": total.chunk(size)[rank],
        "all_to_all": torch.cat([part.chunk(size)[rank] for part in rows]),
        "broadcast": rows[0],
    }
    mine = rows[rank].to(get_device())
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: all_reduce(mine, group),
        "all_gather": lambda: all_gather(mine, group, dim=0),
        "reduce_scatter": lambda: reduce_scatter(mine, group, dim=0),
        "all_to_all": lambda: all_to_all(mine, group, split_dim=0, concat_dim=0),
        "broadcast": lambda: broadcast(mine, group, source=0),
    }
    right = {}
    for name, call in calls.items():
        result = call()
        step_boundary()
        right[name] = torch.equal(result.cpu(), expected[name])
    return right


@dataclass(frozen=True)
class Step:
    """What was measured of one step; the fields are those of `Run`."""

    loss: float
    graphs: int
    compilations: int
    fallbacks: dict[str, int]
    seconds: float


def train(on_device: bool) -> list[Step]:
    """Steps of a small Llama on this repository's README."""
    from nxd_state import get_mesh  # noqa: PLC0415
    from nxd_trainer.recipe import load_recipe  # noqa: PLC0415
    from nxd_trainer.training.run_state import build_run_state  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"data.path={Path(__file__).parents[1] / 'README.md'}",
            f"output={folder}",
            f"parallel.tensor_parallel_size={get_mesh().tp}",
            "data.sequence_length=64",
            "model.hidden_size=128",
            "model.intermediate_size=256",
            "model.num_hidden_layers=2",
            "model.num_key_value_heads=8",
            "train.global_batch_size=4",
            f"train.steps={NUM_STEPS}",
        ]
        state = build_run_state(load_recipe(None, settings))
        return [measure_step(state, on_device) for _ in range(NUM_STEPS)]


def measure_step(state: Any, on_device: bool) -> Step:
    """Take one step and wait for its loss."""
    from nxd_doctor.graphs import graphs_of, read_counters  # noqa: PLC0415
    from nxd_trainer.training.step import take_step  # noqa: PLC0415

    sums: list[Any] = []
    before = read_counters() if on_device else None
    began = perf_counter()
    if before is None:
        sums, graphs = [take_step(state)[0]], 0
    else:
        graphs = len(graphs_of(lambda: sums.append(take_step(state)[0])))
    loss = sums[0].tolist()[0]
    seconds = perf_counter() - began
    if before is None:
        return Step(loss, graphs, 0, {}, seconds)
    counted = read_counters() - before
    # The loss that is read here is what torch-xla counts as a fallback of its own.
    fallbacks = {name: count for name, count in counted.fallbacks.items() if name != "aten::_local_scalar_dense"}
    return Step(loss, graphs, counted.compilations, fallbacks, seconds)


def device_memory() -> dict[str, int]:
    """What torch-xla says of this rank's device, in bytes; nothing where it does not know."""
    import torch_xla.core.xla_model as xm  # noqa: PLC0415
    from nxd_state import get_device  # noqa: PLC0415

    try:
        return {name: int(value) for name, value in xm.get_memory_info(get_device()).items()}
    except RuntimeError:  # a client without such counters
        return {}


def describe_host() -> dict[str, str]:
    """Versions, devices and settings that the results depend on."""
    from nxd_cli.installation import installed_versions, own_packages  # noqa: PLC0415
    from nxd_doctor.installation import OTHERS  # noqa: PLC0415

    devices = sorted(Path("/dev").glob("neuron[0-9]*"))
    settings = {name: os.environ[name] for name in CACHE_AND_FLAGS if name in os.environ}
    system = {"python": platform.python_version(), "system": platform.platform(), "neuron devices": str(len(devices))}
    return system | installed_versions((*own_packages(), *OTHERS)) | settings


def render(report: Report) -> str:
    """The report in Markdown."""
    run, cpu = report.device_run, report.cpu_run
    lines = ["# nxd on Neuron", ""]
    if not report.has_device:
        lines += [
            "**No Neuron device here: one rank ran on torch-xla's CPU client. Nothing below is of a device.**",
            "",
        ]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in report.host.items()), ""]
    lines += ["## Findings", ""]
    lines += [f"- {'yes' if holds else '**NO**'}: {finding}" for finding, holds in report.findings().items()]
    lines += ["", f"## A Llama of 2 layers at TP {run.world_size} on {run.device}", ""]
    lines += ["| step | loss | loss on the CPU | graphs | seconds |", "|---|---|---|---|---|"]
    for step in range(NUM_STEPS):
        graphs = run.graphs[step] if run.graphs else ""
        found, expected = run.losses[step], cpu.losses[step]
        lines.append(f"| {step + 1} | {found:.6f} | {expected:.6f} | {graphs} | {run.seconds[step]:.3f} |")
    steady = median(run.seconds[2:])
    lines += ["", f"- largest relative difference of a loss: {report.loss_difference:.2e}"]
    lines += [f"- {sum(run.compilations)} compilations, {steady * 1e3:.1f} ms a step after the second"]
    lines += [f"- one process on the CPU takes {median(cpu.seconds[2:]) / steady:.2f} times as long"]
    lines += [f"- ran on the CPU instead: {name}, {count} times" for name, count in run.fallbacks.items()]
    lines += [f"- device memory, {name}: {value:,}" for name, value in run.memory.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
