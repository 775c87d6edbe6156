"""What nxd-parity says of differences that one tensor alone does not explain."""

import pytest
import torch
import torch.nn.functional as F
from nxd_parity import compare, record
from torch import nn

CLASSES, WIDTH, ROWS = 32, 16, 256


class Model(nn.Module):
    """Returns its loss, a mean, whose bound in bfloat16 hides what is wrong before it."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.dropout, self.head = nn.Dropout(0.02), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, labels):
        return F.cross_entropy(self.head(self.dropout(self.norm(self.first(x)).tanh())), labels)


def train(folder, dtype, *, steps=1, lr=0.1, seed=1, eps=1e-5, bias=1, noise=None):
    torch.manual_seed(0)
    model = Model().to(dtype)
    model.norm.eps = eps
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    with record(folder, noise=noise):
        for step in range(steps):
            inputs = torch.Generator().manual_seed(step)
            x = torch.randn(ROWS, WIDTH, generator=inputs).to(dtype)
            labels = torch.randint(CLASSES, (ROWS,), generator=inputs)
            torch.manual_seed(100 * step + seed)
            optimizer.zero_grad()
            model(x, labels).backward()
            model.first.bias.grad *= bias
            norm = torch.stack([it.grad.norm() for it in model.parameters()]).norm()
            for parameter in model.parameters():  # clipped by the program's own code
                parameter.grad *= 0.1 / norm
            optimizer.step()


@pytest.fixture
def first_difference(tmp_path):
    """Train a reference, two with noise below float64, and a candidate; return the first difference."""

    def find(dtype, *, steps=1, **of_candidate):
        noises = [] if dtype == torch.float64 else [1, 2]
        for noise in [None, *noises]:
            train(tmp_path / f"noise-{noise}", dtype, steps=steps, noise=noise)
        train(tmp_path / "candidate", dtype, steps=steps, **of_candidate)
        spread = [tmp_path / f"noise-{it}" for it in noises]
        return compare(tmp_path / "noise-None", tmp_path / "candidate", spread=spread).first

    return find


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_dropout_mask_is_named_though_the_loss_hides_it(first_difference, dtype):
    first = first_difference(dtype, seed=2)

    assert first is not None
    assert (first.kind, first.name, first.fault) == ("activation", "dropout", "random numbers")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_parameters_that_part_over_steps_drift(first_difference, dtype):
    lr = 0.1 * (1 + {torch.float64: 1e-8, torch.bfloat16: 0.1}[dtype])

    first = first_difference(dtype, steps=12, lr=lr)

    assert first is not None
    assert first.step > 2
    assert (first.name, first.fault) == ("", "drift")


def test_gradient_that_is_wrong_before_the_program_clips_it_is_named(first_difference):
    first = first_difference(torch.float64, bias=3)

    assert first is not None
    assert (first.kind, first.name, first.fault) == ("gradient", "first.bias", "scaled")
    assert first.factor == pytest.approx(3)  # beside the factor that the clipping gives to all


def test_values_that_all_differ_in_one_direction_are_not_rounded(first_difference):
    first = first_difference(torch.float64, eps=1e-3)

    assert first is not None
    assert (first.kind, first.name, first.fault) == ("activation", "norm", "different values")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equal_programs_do_not_differ(first_difference, dtype):
    assert first_difference(dtype, steps=3) is None


def exchange(optimizer, first, second):
    optimizer.state[first], optimizer.state[second] = optimizer.state[second], optimizer.state[first]


def count_more(optimizer, first, second):
    for parameter in (first, second):
        optimizer.state[parameter]["step"] += 5


@pytest.mark.parametrize(
    ("change", "fault", "detail"),
    [
        (exchange, "state of another parameter", "it was exchanged with that of 1.weight, it seems"),
        (count_more, "stale values", "it counts 7 steps instead of 2"),
    ],
)
def test_optimizer_states_that_were_loaded_wrongly_are_named(tmp_path, change, fault, detail):
    def train(folder, is_changed):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2)])
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            model(torch.randn(5, 4, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        if is_changed:
            change(optimizer, *model.parameters())
        with record(folder):
            step()

    train(tmp_path / "one", False)
    train(tmp_path / "other", True)

    first = compare(tmp_path / "one", tmp_path / "other").first
    assert (first.kind, first.fault, first.detail) == ("optimizer state", fault, detail)
