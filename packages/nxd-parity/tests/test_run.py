"""`nxd-parity run`: programs are recorded as they are, started by their commands."""

import json
import shlex

import pytest
from nxd_parity.command import main

TRAIN = """
import itertools
import random
import sys

import numpy
import torch
import torch.distributed as dist

size, fault = int(sys.argv[1]), sys.argv[2]
if size > 1:
    dist.init_process_group("gloo")
rank = dist.get_rank() if size > 1 else 0


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context, gradient):
        return gradient


class Row(torch.nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs).chunk(size, 1)[rank].clone())

    def forward(self, x):
        out = x.chunk(size, -1)[rank] @ self.weight.T
        return Sum.apply(out) if size > 1 and fault != "no sum" else out


class Batches(torch.utils.data.Dataset):
    helper = torch.nn.Linear(1, 1)

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        self.helper(torch.ones(1))  # in a process of its own
        return torch.full((3, 4), float(index % 5 + 1))


model = torch.nn.Sequential(Row(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + random.random() + numpy.random.rand()))
for batch in itertools.cycle(torch.utils.data.DataLoader(Batches(), batch_size=None, num_workers=1)):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory, whose programs load a `sitecustomize` of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('their own sitecustomize')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        pytest.param("none", None, id="right"),
        pytest.param("no sum", (1, "activation", "0", "missing sum"), id="fault", marks=pytest.mark.slow),
    ],
)
def test_programs_that_train_on_are_recorded_and_compared(folder, fresh_python, capfd, fault, found):
    python = shlex.quote(fresh_python)
    launch = f"{python} -m torch.distributed.run --standalone --nproc-per-node 2"

    programs = ["--reference", f"{python} train.py 1 none", "--candidate", f"{launch} train.py 2 {shlex.quote(fault)}"]
    exit_code = main(["run", "--steps", "2", "--float64", "--json", *programs])

    report = json.loads(capfd.readouterr().out)
    assert exit_code == (0 if found is None else 3), report
    assert (report["ranks"], report["steps"]) == (2, 2)
    first = report["findings"][0] if report["findings"] else None
    assert found == (first and tuple(first[it] for it in ("step", "kind", "name", "fault")))
    assert any(it.startswith("the seeds of random, numpy and torch are 0") for it in report["notes"])
    assert "their own sitecustomize" in (folder / "nxd-parity-run" / "reference.log").read_text()


FORKS = """
import multiprocessing
import os
import sys

import torch
import torch.distributed as dist


def train(rank, size, store):
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{os.path.abspath(store)}", rank=rank, world_size=size)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        model(torch.full((3, 4), 1.0 + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    way, store = sys.argv[1:]
    torch.manual_seed(0)
    if way == "alone":
        train(0, 1, store)
    else:
        context = multiprocessing.get_context(way)
        ranks = [context.Process(target=train, args=(rank, 2, store)) for rank in range(2)]
        for it in ranks:
            it.start()
        for it in ranks:
            it.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_ranks_that_a_program_starts_itself_are_recorded_to_the_end(folder, fresh_python, capfd, way):
    (folder / "forks.py").write_text(FORKS)
    command = f"{shlex.quote(fresh_python)} forks.py"

    programs = ["--reference", f"{command} alone store", "--candidate", f"{command} {way} store"]
    exit_code = main(["run", "--steps", "2", "--float64", "--json", *programs])

    report = json.loads(capfd.readouterr().out)
    assert (exit_code, report["ranks"], report["steps"]) == (0, 2, 2), report
    assert report["agree"]["parameter"] == 3 * 2


def test_noise_shows_a_reference_whose_data_are_not_repeatable(folder, fresh_python, capfd):
    (folder / "random_data.py").write_text(
        "import os, torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "model(torch.frombuffer(bytearray(os.urandom(4)), dtype=torch.uint8) / 256).sum().backward()\n"
    )
    command = f"{shlex.quote(fresh_python)} random_data.py"

    exit_code = main(["run", "--noise", "1", "--reference", command, "--candidate", command])

    text = " ".join(capfd.readouterr().out.split())
    assert exit_code == 3
    assert "step 1, input, the whole model" in text
    assert "the reference gets other inputs each time it runs" in text
    assert "the candidate ran as a single rank, too" in text


ERRORS = {
    "missing": ("no-such-program train.py", "cannot start 'no-such-program'"),
    "quotes": ("python 'train.py", "cannot be split into words: No closing quotation"),
    "empty": ("A=1", "'A=1' is not a command"),
    "fails": ('NAME=Ada python -c \'import os; raise SystemExit("no " + os.environ["NAME"])\'', "no Ada"),
    "no model": ("python -c 'print(\"done\")'", "called no torch module with parameters"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_command_that_cannot_be_recorded_is_an_error(folder, fresh_python, capfd, case):
    command, message = ERRORS[case]
    command = command.replace("python", shlex.quote(fresh_python))

    exit_code = main(["run", "--reference", command, "--candidate", "false"])

    assert exit_code == 2
    assert message in capfd.readouterr().err


def test_command_that_hangs_is_ended(folder, fresh_python, capfd):
    hang = "import threading; print('waiting', flush=True); threading.Event().wait()"
    command = shlex.join([fresh_python, "-c", hang])

    exit_code = main(["run", "--timeout", "1", "--reference", command, "--candidate", command])

    assert exit_code == 2
    assert "took longer than --timeout 1 seconds" in capfd.readouterr().err


def test_folder_with_other_files_is_kept(folder, capfd):
    (folder / "results" / "reference").mkdir(parents=True)
    (folder / "results" / "reference" / "thesis.txt").write_text("")

    exit_code = main(["run", "--folder", "results", "--reference", "false", "--candidate", "false"])

    assert exit_code == 2
    assert "thesis.txt is not part of a recording; pass another --folder" in capfd.readouterr().err
    assert (folder / "results" / "reference" / "thesis.txt").exists()
