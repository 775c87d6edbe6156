"""Gradients averaged over replicas are those of one process with the whole batch."""

import pytest
import torch
from nxd_optim import GradientReducer
from nxd_state import get_group, initialize_model_parallel
from torch import nn
from torch.utils.checkpoint import checkpoint

FEATURES, ROWS, STEPS = 6, 36, 3


class Tied(nn.Module):
    """One weight used twice."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, FEATURES) / 4)
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.head(torch.tanh(x @ self.weight.t()) @ self.weight)


class Checkpointed(nn.Module):
    """Activations are computed again in backward; with a tied weight where checkpoints allow one."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.second, self.head = Tied(), nn.Linear(1, FEATURES), Tied()
        if not use_reentrant:
            self.head.weight = self.first.weight

    def forward(self, x):
        x = x.clone().requires_grad_()
        x = checkpoint(self.first, x, use_reentrant=self.use_reentrant)
        return checkpoint(self.head, torch.tanh(self.second(x)), use_reentrant=self.use_reentrant)


class MixedDtypes(nn.Module):
    """float64 and float32 take turns."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.middle = nn.Linear(16, 16).float()
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(self.first(x).float())).double())


class OddParameters(nn.Module):
    """A transposed one, a scalar, an empty one, one that no output needs, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.transposed = nn.Parameter((torch.randn(16, FEATURES) / 4).t())
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.unused = nn.Parameter(torch.randn(7))
        self.frozen = nn.Parameter(torch.randn(16, 16) / 4, requires_grad=False)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.scale * self.head(torch.tanh(x @ self.transposed) @ self.frozen) + self.empty.sum()


class SparseEmbedding(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4, sparse=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.embedding((x.abs() * 100).long()[:, 0] % 5)))


def feed_forward():
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


MODELS = {
    "tied": Tied,
    "checkpointed": lambda: Checkpointed(use_reentrant=False),
    "reentrant checkpoints": lambda: Checkpointed(use_reentrant=True),
    "mixed dtypes": MixedDtypes,
    "odd parameters": OddParameters,
    "sparse embedding": SparseEmbedding,
}


def build(make_model):
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        return make_model()
    finally:
        torch.set_default_dtype(torch.float32)


def mean_loss(model, rows):
    return (model(rows) - rows.sum(dim=1, keepdim=True)).square().mean()


def whole_batch(step):
    return torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def record(model, history):
    history.append([None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()])


def train_alone(make_model):
    """Every step's gradients and the weights at the end, of one process with the whole batch."""
    model, gradients = build(make_model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_loss(model, whole_batch(step)).backward()
        record(model, gradients)
        optimizer.step()
    return gradients, [p.detach() for p in model.parameters()]


def train_replica(make_model, *, accumulation=1, overlap=True, zero_grad="reducer", bucket_bytes=1000):
    """The same on one of several ranks, each with its part of the batch."""
    initialize_model_parallel()
    replicas = get_group("dp")
    model, gradients = build(make_model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reducer = GradientReducer(model.parameters(), bucket_bytes=bucket_bytes)
    for step in range(STEPS):
        microbatches = whole_batch(step)[replicas.rank :: replicas.size].chunk(accumulation)
        for rows in microbatches[:-1]:
            (mean_loss(model, rows) / accumulation).backward()
        if overlap:
            with reducer.overlap_backward():
                (mean_loss(model, microbatches[-1]) / accumulation).backward()
        else:
            (mean_loss(model, microbatches[-1]) / accumulation).backward()
        reducer.finish()
        record(model, gradients)
        optimizer.step()
        if zero_grad == "reducer":
            reducer.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=zero_grad == "none")
    return gradients, [p.detach() for p in model.parameters()]


def assert_close(tensors, expected):
    rtol = 1e-4 if any(wanted is not None and wanted.dtype == torch.float32 for wanted in expected) else 1e-10
    for tensor, wanted in zip(tensors, expected, strict=True):
        if wanted is None:  # a parameter that nothing uses: frozen, or zero instead of None
            assert tensor is None or tensor.count_nonzero() == 0
        else:
            torch.testing.assert_close(tensor, wanted, rtol=rtol, atol=rtol / 1000)


def assert_same_training(replica, alone):
    for gradients, wanted in zip(replica[0], alone[0], strict=True):
        assert_close(gradients, wanted)
    assert_close(replica[1], alone[1])


@pytest.mark.pairs
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_training_on_replicas_equals_one_process_with_the_whole_batch(run_ranks, replicas, accumulation, overlap):
    alone = train_alone(feed_forward)

    results = run_ranks(lambda: train_replica(feed_forward, accumulation=accumulation, overlap=overlap), replicas)

    for replica in results:
        assert_same_training(replica, alone)


@pytest.mark.pairs
@pytest.mark.parametrize("bucket_bytes", [1, 300, 2**20])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_training_of_unusual_models_equals_one_process(run_ranks, model, accumulation, bucket_bytes):
    make_model = MODELS[model]
    alone = train_alone(make_model)

    results = run_ranks(
        lambda: train_replica(make_model, accumulation=accumulation, bucket_bytes=bucket_bytes),
        2,
    )

    for replica in results:
        assert_same_training(replica, alone)


@pytest.mark.sample(4)
@pytest.mark.parametrize("zero_grad", ["reducer", "none", "zeros"])
@pytest.mark.parametrize("model", MODELS)
def test_training_equals_one_process_whoever_clears_the_gradients(run_ranks, model, zero_grad):
    make_model = MODELS[model]
    alone = train_alone(make_model)

    results = run_ranks(lambda: train_replica(make_model, accumulation=3, zero_grad=zero_grad), 2)

    for replica in results:
        assert_same_training(replica, alone)


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_averaged_gradients_are_bitwise_equal_on_all_replicas(run_ranks, replicas):
    def average():
        initialize_model_parallel()
        model = build(feed_forward).float()
        reducer = GradientReducer(model.parameters(), bucket_bytes=500)
        rank = get_group("dp").rank
        with reducer.overlap_backward():
            mean_loss(model, whole_batch(rank).float() * 10**rank).backward()
        reducer.finish()
        return [p.grad for p in model.parameters()]

    first, *others = run_ranks(average, replicas)

    for gradients in others:
        assert all(torch.equal(a, b) for a, b in zip(first, gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_averaged_in_their_dtype(run_ranks, dtype, set_gradients):
    def average():
        initialize_model_parallel()
        model = feed_forward().to(dtype)
        reducer = GradientReducer(model.parameters())
        set_gradients(reducer.parameters, seed=get_group("dp").rank)
        reducer.finish()
        return [p.grad for p in model.parameters()]

    results = run_ranks(average, 2)

    shapes = [p.shape for p in feed_forward().parameters()]
    generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
    local = [[torch.randn(shape, generator=g).to(dtype) for shape in shapes] for g in generators]
    for gradients in results:
        for gradient, a, b in zip(gradients, *local, strict=True):
            assert torch.equal(gradient, (a + b) / 2)


def test_parameter_used_on_one_replica_only_counts_as_zero_on_the_other(run_ranks):
    def average():
        initialize_model_parallel()
        parameter = nn.Parameter(torch.ones(3))
        other = nn.Parameter(torch.ones(3))
        reducer = GradientReducer([parameter, other])
        with reducer.overlap_backward():
            ((parameter * 4).sum() if get_group("dp").rank == 0 else other.sum()).backward()
        reducer.finish()
        return parameter.grad, other.grad

    for gradient, other in run_ranks(average, 2):
        assert gradient.tolist() == [2, 2, 2]
        assert other.tolist() == [0.5, 0.5, 0.5]


@pytest.mark.pairs
@pytest.mark.parametrize("zero_grad", ["reducer", "none", "zeros"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("replicas", [1, 2])
def test_parameter_unused_after_a_step_that_used_it_has_zero_gradient(run_ranks, replicas, overlap, zero_grad):
    def two_steps():
        initialize_model_parallel()
        sometimes, always = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([sometimes, always])
        reducer = GradientReducer([sometimes, always])
        for used in ([sometimes, always], [always]):
            if zero_grad == "reducer":
                reducer.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=zero_grad == "none")
            if overlap:
                with reducer.overlap_backward():
                    torch.cat(used).sum().backward()
            else:
                torch.cat(used).sum().backward()
            reducer.finish()
        return sometimes.grad, always.grad

    for sometimes, always in run_ranks(two_steps, replicas):
        assert sometimes.tolist() == [0, 0, 0]
        assert always.tolist() == [1, 1, 1]


def test_gradient_that_the_user_replaced_is_the_one_averaged(run_ranks):
    def average():
        initialize_model_parallel()
        parameter = nn.Parameter(torch.ones(2, 3))
        reducer = GradientReducer([parameter])
        parameter.sum().backward()
        parameter.grad = torch.full((3, 2), float(1 + get_group("dp").rank)).t()
        parameter.sum().backward()
        reducer.finish()
        return parameter.grad

    for gradient in run_ranks(average, 2):
        assert torch.equal(gradient, torch.full((2, 3), 2.5))


def test_gradients_with_a_history_are_averaged(run_ranks):
    def average():
        initialize_model_parallel()
        parameter = nn.Parameter(torch.full((2,), 3.0))
        reducer = GradientReducer([parameter])
        for _ in range(2):
            (parameter.square().sum() * (1 + get_group("dp").rank)).backward(create_graph=True)
        reducer.finish()
        assert not parameter.grad.requires_grad
        return parameter.grad

    for gradient in run_ranks(average, 2):
        assert gradient.tolist() == [18, 18]


@pytest.mark.parametrize("degrees", [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}])
def test_average_is_over_the_data_parallel_ranks_of_the_mesh(run_ranks, degrees):
    def average():
        initialize_model_parallel(**degrees)
        parameter = nn.Parameter(torch.ones(2))
        reducer = GradientReducer([parameter])
        (parameter * 10 ** get_group("pp", "tp").rank * (1 + get_group("dp").rank)).sum().backward()
        reducer.finish()
        return get_group("pp", "tp").rank, parameter.grad

    for model_rank, gradient in run_ranks(average, 4):
        assert gradient.tolist() == [1.5 * 10**model_rank] * 2


def test_average_is_over_context_parallel_ranks_too(run_ranks):
    def average():
        initialize_model_parallel(context_parallel_size=2)
        parameter = nn.Parameter(torch.ones(1))
        reducer = GradientReducer([parameter])
        (parameter * 2 ** (get_group("dp").rank * 2 + get_group("cp").rank)).backward()
        reducer.finish()
        return parameter.grad.item()

    assert run_ranks(average, 4) == [(1 + 2 + 4 + 8) / 4] * 4


def test_average_is_over_the_group_that_is_given(run_ranks):
    def average():
        initialize_model_parallel(tensor_model_parallel_size=2)
        parameter = nn.Parameter(torch.ones(1))
        reducer = GradientReducer([parameter], get_group("tp"))
        (parameter * get_group("tp").rank).backward()
        reducer.finish()
        return parameter.grad.item()

    assert run_ranks(average, 2) == [0.5, 0.5]


def test_reducer_without_a_mesh_leaves_the_gradients_of_one_process():
    parameter = nn.Parameter(torch.ones(2))
    reducer = GradientReducer([parameter])

    with reducer.overlap_backward():
        parameter.sum().backward()
    reducer.finish()

    assert parameter.grad.tolist() == [1, 1]


def test_average_of_bfloat16_gradients_in_float32_is_rounded_once(run_ranks):
    values = [1.0, 2**-8, 2**-8, 2**-8]  # in bfloat16, 1 + 2**-8 is 1 again

    def average(reduce_dtype):
        initialize_model_parallel()
        parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        reducer = GradientReducer([parameter], reduce_dtype=reduce_dtype)
        parameter.grad = torch.full_like(parameter, values[get_group("dp").rank])
        reducer.finish()
        assert parameter.grad.dtype == torch.bfloat16
        return parameter.grad.tolist()

    expected = torch.tensor(sum(values) / 4).to(torch.bfloat16).item()

    assert run_ranks(average, 4, torch.float32) == [[expected] * 3] * 4


def test_reduction_in_a_dtype_without_fractions_raises():
    with pytest.raises(ValueError, match=r"reduce_dtype=torch.int32 cannot hold an average"):
        GradientReducer([], reduce_dtype=torch.int32)
