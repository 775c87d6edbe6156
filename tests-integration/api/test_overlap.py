"""`run_train` has gradients leave while backward is still running, and they are those of one process."""

from contextlib import nullcontext
from unittest import mock

import neuronx_distributed as nxd
import pytest
import torch
from nxd_optim.reducer import GradientBucket
from nxd_optim.zero.flat_bucket import FlatBucket
from nxd_state import get_group
from torch import nn

WIDTH, DEPTH, ROWS, STEPS = 1024, 8, 8, 2
LAYER_BYTES = WIDTH * WIDTH * 8  # 8 MiB, of which three are a bucket


class Layer(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(DEPTH))

    def forward(self, x, wanted):
        for layer in self.layers:
            x = layer(x)
        return (x - wanted).square().mean()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2)]


def weights_of_one_process():
    torch.manual_seed(0)
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        model(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight[:2].detach().clone() for name, weight in model.named_parameters()}


class Sent:
    """Counts the bytes that leave, and those that had left when the first layer of this rank got its last gradient."""

    def __init__(self, model):
        self.bytes = self.before_the_end = 0
        first = next(model.parameters())
        first.register_post_accumulate_grad_hook(self._note)

    def _note(self, _):
        self.before_the_end = self.bytes

    def counting(self, bucket_class, name, size):
        original = getattr(bucket_class, name)

        def send(bucket, *args):
            self.bytes += size(bucket)
            return original(bucket, *args)

        return mock.patch.object(bucket_class, name, send)


def train(pp, zero1, microbatches, calls, guard):
    """Weights on this rank after all steps; for each step, what left before the end of backward, and all that left."""
    config = nxd.neuronx_distributed_config(
        pipeline_parallel_size=pp,
        pipeline_config={
            "transformer_layer_cls": Layer,
            "num_microbatches": microbatches,
            "auto_partition": True,
            "input_names": ["x", "wanted"],
        },
        optimizer_config={"zero_one_enabled": zero1, "grad_clipping": False},
    )
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(config, Layers)
    sent = Sent(model)
    optimizer = nxd.initialize_parallel_optimizer(
        config, torch.optim.SGD, model.parameters(), lr=0.1 / calls, momentum=0.9
    )
    replicas = get_group("dp")
    shares = []
    with (
        sent.counting(GradientBucket, "average", lambda bucket: bucket.buffer.nbytes),
        sent.counting(FlatBucket, "send", lambda bucket: bucket.parameter_bytes),
    ):
        for step in range(STEPS):
            sent.bytes = 0
            parts = zip(
                *[tensor.chunk(replicas.size)[replicas.rank].chunk(calls) for tensor in batch(step)], strict=True
            )
            for call, inputs in enumerate(parts):
                waits = guard == "no_sync" and call < calls - 1
                with model.no_sync() if waits else nullcontext():
                    if guard == "own backward":
                        with optimizer.overlap_backward():
                            model(*inputs).backward()
                    else:
                        model.run_train(*inputs)
            optimizer.step()
            optimizer.zero_grad()
            size = sum(parameter.nbytes for parameter in model.parameters())
            shares.append((sent.before_the_end / size, sent.bytes / size))
    return {name: weight[:2].detach() for name, weight in model.named_parameters()}, shares


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("ranks", "pp", "microbatches", "calls", "guard", "shares"),
    [
        pytest.param(2, 1, 1, 1, "", (6 / 8, 1), id="one backward"),
        pytest.param(2, 1, 2, 1, "", (6 / 8, 1), id="microbatches"),
        pytest.param(2, 1, 1, 2, "no_sync", (6 / 8, 1), id="several calls, all but the last in no_sync"),
        pytest.param(2, 1, 1, 2, "", (1 + 6 / 8, 2), id="several calls, each communicates"),
        pytest.param(2, 1, 1, 1, "own backward", (6 / 8, 1), id="a backward of the script"),
        pytest.param(4, 2, 2, 1, "", (3 / 4, 1), id="pipeline"),
        pytest.param(4, 2, 1, 2, "no_sync", (3 / 4, 1), id="pipeline in no_sync"),
    ],
)
@pytest.mark.parametrize("zero1", [False, True])
def test_gradients_leave_during_the_last_backward(run_ranks, ranks, pp, microbatches, calls, guard, shares, zero1):
    expected = weights_of_one_process()

    for weights, found in run_ranks(train, ranks, pp, zero1, microbatches, calls, guard):
        assert found == [pytest.approx(shares, rel=1e-3)] * STEPS
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-10, atol=1e-12)
