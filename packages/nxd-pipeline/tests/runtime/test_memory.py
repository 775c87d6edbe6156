"""A step holds the activations that its schedule says, and the meter counts what is there."""

import torch
from nxd_pipeline.model import NxDPPModel
from nxd_pipeline.runtime import StepMemory
from nxd_pipeline.schedules import ActivationSize, make_schedule, peak_in_flight
from nxd_state import initialize_model_parallel
from torch import nn

HIDDEN, BATCH, LAYERS = 64, 256, 16


class Layer(nn.Module):
    """Keeps two activations of `[batch, hidden]` for its backward."""

    def __init__(self):
        super().__init__()
        self.linear, self.other = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return torch.tanh(self.other(torch.tanh(self.linear(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[Layer() for _ in range(LAYERS)])

    def forward(self, x):
        return self.layers(x).square().mean()


def peaks(schedule, virtual_pipeline_size):
    """The most bytes that a rank holds, in units of what a microbatch leaves on all the layers of a rank."""
    pipeline = NxDPPModel(
        Model(),
        Layer,
        8,
        auto_partition=True,
        schedule=schedule,
        virtual_pipeline_size=virtual_pipeline_size,
    )
    batch = {"x": torch.randn(BATCH, HIDDEN)}
    pipeline.run_train(**batch)
    with StepMemory() as memory:
        pipeline.run_train(**batch)
    layer = 2 * BATCH // 8 * HIDDEN * 4
    return memory.peak_bytes / (LAYERS / 2 * layer), memory.held_bytes


def test_one_forward_one_backward_holds_at_most_two_fifths_of_gpipe(run_ranks):
    def measure():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        return peaks("gpipe", 1), peaks("1f1b", 1)

    for (gpipe, gpipe_left), (one_forward, one_forward_left) in run_ranks(measure, 2):
        assert gpipe > 8
        assert one_forward <= 0.4 * gpipe
        assert gpipe_left == one_forward_left == 0


def test_schedules_hold_no_more_than_their_bound(run_ranks):
    """Up to messages and the gradients of a backward under way, which come to less than a microbatch's activations."""
    cases = [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2)]

    def measure():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        return [peaks(*case) for case in cases]

    measured = run_ranks(measure, 2)

    for index, (name, stages_per_rank) in enumerate(cases):
        schedule = make_schedule(name, 2, 8, virtual_pipeline_size=stages_per_rank)
        # What waits for the gradients of weights: inputs of the linear layers, and as large gradients of their outputs.
        sizes = [ActivationSize(until_backward=1, until_weights=2)] * schedule.num_stages
        for rank, bound in enumerate(peak_in_flight(schedule, sizes)):
            peak, left = measured[rank][index]
            assert peak <= bound / stages_per_rank + 1, (name, rank, peak)
            assert left == 0


def test_memory_counts_what_is_made_and_not_yet_gone():
    with StepMemory() as memory:
        kept = torch.zeros(1000)
        for _ in range(3):
            torch.zeros(500).view(5, 100).add_(1)
        kept = [kept.view(10, 100), kept[5:]]

    assert (memory.held_bytes, memory.peak_bytes) == (4000, 6000)
    del kept
    assert memory.held_bytes == 0


def test_a_storage_counts_as_much_as_it_has_now():
    before = torch.zeros(1000)
    with StepMemory() as memory:
        tensor = torch.zeros(100)
        tensor.untyped_storage().resize_(0)
        assert (memory.held_bytes, memory.peak_bytes) == (0, 400)
        tensor.untyped_storage().resize_(600)
        before.untyped_storage().resize_(4100)
        assert memory.held_bytes == 700
        del tensor
        assert memory.held_bytes == 100
    before.untyped_storage().resize_(0)
    assert memory.held_bytes == 100
