"""What a reducer sends, and when: buckets, their order, and their place between the steps of backward."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from nxd_optim import GradientReducer
from nxd_optim.bucket_sender import batch_parameters
from nxd_optim.reducer import GradientBucket
from nxd_state import initialize_model_parallel
from nxd_testing import RankFailure
from torch import nn

FLOAT_BYTES = 4


@pytest.fixture
def messages_of_one_step(run_ranks, recorded_messages):
    """A function that returns (elements, dtype) of the messages of one rank, having checked that all sent the same."""

    def run(make_parameters, *, bucket_bytes, replicas=2, overlap=True):
        def step():
            initialize_model_parallel()
            reducer = GradientReducer(make_parameters(), bucket_bytes=bucket_bytes)
            with recorded_messages() as messages:
                if overlap:
                    loss = sum((p.float().sum() for p in reducer.parameters), torch.zeros((), requires_grad=True))
                    with reducer.overlap_backward():
                        loss.backward()
                reducer.finish()
            return [message[1:] for message in messages]

        first, *others = run_ranks(step, replicas)
        assert all(messages == first for messages in others)
        return first

    return run


@pytest.mark.parametrize(
    ("sizes", "bucket_elements", "expected"),
    [
        pytest.param([3, 4, 5], 100, [12], id="all in one"),
        pytest.param([3, 4, 5], 1, [5, 4, 3], id="each larger than a bucket"),
        pytest.param([3, 4, 5, 2], 7, [7, 7], id="filled exactly, last parameters first"),
        pytest.param([3, 4, 50, 2, 2], 7, [4, 50, 7], id="a large one between small ones"),
        pytest.param([2, 6, 2, 6], 7, [6, 2, 6, 2], id="no room for the next"),
        pytest.param([4, 0, 4], 4, [4, 4], id="an empty parameter"),
        pytest.param([], 4, [], id="no parameters"),
    ],
)
@pytest.mark.parametrize("overlap", [True, False])
def test_messages_hold_parameters_from_last_to_first(messages_of_one_step, sizes, bucket_elements, expected, overlap):
    messages = messages_of_one_step(
        lambda: [nn.Parameter(torch.ones(size)) for size in sizes],
        bucket_bytes=bucket_elements * FLOAT_BYTES,
        overlap=overlap,
    )

    assert [elements for elements, _ in messages] == expected


def test_messages_by_default_hold_25_mebibytes(run_ranks, recorded_messages):
    def step():
        initialize_model_parallel()
        parameters = [nn.Parameter(torch.ones(1024, 1024)) for _ in range(8)]
        reducer = GradientReducer(parameters)
        with recorded_messages() as messages:
            reducer.finish()
        return [elements * FLOAT_BYTES // 2**20 for _, elements, _ in messages]

    assert run_ranks(step, 2) == [[24, 8]] * 2


def test_messages_of_dtypes_are_apart_and_leave_as_backward_fills_them(messages_of_one_step):
    # The float32 bucket takes the last parameter first, but is full only with the first parameter of the model.
    sizes = [(1, torch.float32), (10, torch.bfloat16), (10, torch.bfloat16), (1, torch.float32)]

    messages = messages_of_one_step(
        lambda: [nn.Parameter(torch.ones(size, dtype=dtype)) for size, dtype in sizes],
        bucket_bytes=20,
    )

    assert messages == [(10, torch.bfloat16), (10, torch.bfloat16), (2, torch.float32)]


def test_messages_leave_out_frozen_and_repeat_no_tied_parameters(messages_of_one_step):
    def make_parameters():
        tied = nn.Parameter(torch.ones(3))
        return (p for p in (tied, nn.Parameter(torch.ones(50), requires_grad=False), tied, nn.Parameter(torch.ones(2))))

    messages = messages_of_one_step(make_parameters, bucket_bytes=1)

    assert [elements for elements, _ in messages] == [2, 3]


@settings(max_examples=25, deadline=None)
@given(
    parameters=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.float64, torch.bfloat16])), max_size=12
    ),
    bucket_bytes=st.integers(1, 300),
)
def test_messages_hold_every_element_once_in_buckets_of_the_given_size(parameters, bucket_bytes):
    tensors = [nn.Parameter(torch.ones(size, dtype=dtype)) for size, dtype in parameters]

    buckets = [GradientBucket(batch) for batch in batch_parameters(tensors, bucket_bytes)]

    held = [id(p) for bucket in buckets for p in bucket.parameters]
    assert sorted(held) == sorted(map(id, tensors))
    for bucket in buckets:
        assert bucket.buffer.nbytes <= bucket_bytes or len([p for p in bucket.parameters if p.numel()]) == 1
        assert {p.dtype for p in bucket.parameters} == {bucket.buffer.dtype}
        assert bucket.buffer.numel() == sum(p.numel() for p in bucket.parameters)


def test_one_replica_sends_nothing(messages_of_one_step):
    messages = messages_of_one_step(lambda: [nn.Parameter(torch.ones(3))], bucket_bytes=1, replicas=1)

    assert messages == []


@pytest.mark.parametrize("accumulation", [1, 2, 5])
def test_accumulation_sends_nothing_before_the_last_backward(run_ranks, recorded_messages, accumulation):
    def step():
        initialize_model_parallel()
        parameters = [nn.Parameter(torch.ones(3)) for _ in range(4)]
        reducer = GradientReducer(parameters, bucket_bytes=1)
        with recorded_messages() as messages:
            for _ in range(accumulation - 1):
                sum(p.sum() for p in parameters).backward()
            before = len(messages)
            with reducer.overlap_backward():
                sum(p.sum() for p in parameters).backward()
            inside = len(messages)
            reducer.finish()
        return before, inside, len(messages), parameters[0].grad.tolist()

    assert run_ranks(step, 2) == [(0, 4, 4, [accumulation] * 3)] * 2


class Layer(nn.Module):
    """A linear layer that notes when backward comes to it."""

    def __init__(self, name, events):
        super().__init__()
        self.linear, self.name, self.events = nn.Linear(4, 4, bias=False), name, events

    def forward(self, x):
        y = self.linear(x)
        y.register_hook(lambda _: self.events.append(("backward", self.name)))
        return y


def test_buckets_leave_while_backward_is_running(run_ranks, recorded_messages):
    def step():
        initialize_model_parallel()
        events = []
        model = nn.Sequential(*(Layer(name, events) for name in "abc"))
        reducer = GradientReducer(model.parameters(), bucket_bytes=1)
        with recorded_messages(events), reducer.overlap_backward():
            model(torch.ones(2, 4)).sum().backward()
        reducer.finish()
        return [event[:2] for event in events]

    expected = [event for name in "cba" for event in (("backward", name), ("message", 16))]
    assert run_ranks(step, 2) == [expected] * 2


def test_buckets_leave_in_order_although_a_parameter_is_used_out_of_order(run_ranks, recorded_messages):
    def step():
        initialize_model_parallel()
        early, late = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))
        reducer = GradientReducer([early, late], bucket_bytes=1)
        events = []
        early.register_post_accumulate_grad_hook(lambda _: events.append("gradient of early"))
        with recorded_messages(events), reducer.overlap_backward():
            # `late` gets its gradient last.
            (early * torch.tanh(late).sum()).sum().backward()
        reducer.finish()
        return [event if isinstance(event, str) else event[:2] for event in events]

    assert run_ranks(step, 2) == [["gradient of early", ("message", 2), ("message", 1)]] * 2


def test_all_buckets_have_left_at_the_end_of_overlap_backward_although_one_was_not_filled(run_ranks, recorded_messages):
    # Ranks that differ in what they use must not differ in what they have sent when they go on.
    def step():
        initialize_model_parallel()
        rank = torch.distributed.get_rank()
        parameters = [nn.Parameter(torch.ones(size)) for size in (1, 2, 3)]
        reducer = GradientReducer(parameters, bucket_bytes=1)
        with recorded_messages() as messages:
            with reducer.overlap_backward():
                parameters[rank].sum().backward()
            sent = [elements for _, elements, _ in messages]
            reducer.finish()
        return sent, len(messages)

    assert run_ranks(step, 2) == [([3, 2, 1], 3)] * 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_exist_once_in_one_buffer_per_message(run_ranks, set_to_none):
    def step():
        initialize_model_parallel()
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        optimizer = torch.optim.SGD(model.parameters())
        reducer = GradientReducer(model.parameters(), bucket_bytes=16 * 8 * FLOAT_BYTES)
        storages = []
        for _ in range(2):
            optimizer.zero_grad(set_to_none=set_to_none)
            for _ in range(2):
                model(torch.ones(2, 8)).sum().backward()
                storages.append({p.grad.untyped_storage().data_ptr() for p in model.parameters()})
            reducer.finish()
            storages.append({p.grad.untyped_storage().data_ptr() for p in model.parameters()})
        sizes = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in model.parameters()}
        return storages, sorted(sizes.values())

    for storages, sizes in run_ranks(step, 2):
        assert all(found == storages[0] for found in storages)
        # From the back: 8 biases, then 8 x 16 weights; 16 biases, then 16 x 8 weights.
        assert sizes == sorted(n * FLOAT_BYTES for n in (8, 8 * 16, 16, 16 * 8))


@pytest.mark.parametrize(
    "make_parameters",
    [
        pytest.param(lambda rank: [torch.ones(2 + rank)], id="shapes"),
        pytest.param(lambda rank: [torch.ones(2)] * (1 + rank), id="number"),
        pytest.param(lambda rank: [torch.ones(2), torch.ones(3)][:: 1 - 2 * rank], id="order"),
        pytest.param(lambda rank: [torch.ones(2, dtype=(torch.float32, torch.float64)[rank])], id="dtypes"),
    ],
)
def test_reducer_given_different_parameters_on_the_ranks_raises_on_all(run_ranks, make_parameters):
    def construct():
        initialize_model_parallel()
        tensors = make_parameters(torch.distributed.get_rank())
        GradientReducer([nn.Parameter(tensor) for tensor in tensors])

    with pytest.raises(RankFailure) as failure:
        run_ranks(construct, 2)

    summaries = [failed.summary for failed in failure.value.failures.values()]
    assert len(summaries) == 2
    assert all("rank 1 passed" in summary and "in the same order on every rank" in summary for summary in summaries)


def test_reducer_given_no_room_for_a_bucket_raises():
    with pytest.raises(ValueError, match="bucket_bytes=0 must be positive; the default is 26214400"):
        GradientReducer([nn.Parameter(torch.ones(2))], bucket_bytes=0)
