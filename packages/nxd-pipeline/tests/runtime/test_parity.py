"""Loss and gradients of a pipeline are those of one process, for every schedule, shape of output and wiring."""

import pytest
import torch
from nxd_pipeline.model import NxDPPModel
from nxd_state import initialize_model_parallel

OPTIONS = [
    {},
    {"tied": True},
    {"skip": True, "returns": "tuple"},
    {"tied": True, "skip": True, "returns": "dict"},
]


def one_process(model, batch, pick):
    loss = pick(model(**batch))
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}


def pick_loss(output):
    if isinstance(output, dict):
        return output["loss"]
    return output[0] if isinstance(output, tuple) else output


def assert_same_as_one_process(results, model, batch):
    loss, gradients = one_process(model, batch, pick_loss)
    (last_loss,) = [it for it, _ in results if it is not None]
    torch.testing.assert_close(last_loss, loss, rtol=1e-10, atol=1e-12)
    held = set()
    for _, local in results:
        held |= local.keys()
        for name, gradient in local.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-12, msg=name)
    assert held == gradients.keys() or held == dict(model.named_parameters()).keys()


SCHEDULES = [
    ("gpipe", 1),
    ("gpipe", 2),
    ("1f1b", 1),
    ("interleaved", 2),
    ("zb-h1", 1),
    ("zb-v", 2),
    ("dualpipe-v", 2),
]
# Every schedule with every number of microbatches and every model, if not each with each.
CASES = [
    (schedule, num_microbatches, OPTIONS[(index + number) % len(OPTIONS)])
    for index, schedule in enumerate(SCHEDULES)
    for number, num_microbatches in enumerate([1, 2, 3, 4, 8])
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("pipeline_size", [2, 4])
def test_train_any_schedule_and_model_equals_one_process(
    run_ranks, make_model, make_batch, loss_specs, layer_class, pipeline_size
):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=pipeline_size)
        results = []
        for (schedule, virtual), num_microbatches, options in CASES:
            pipeline = NxDPPModel(
                make_model(num_layers=8, **options),
                layer_class,
                num_microbatches,
                loss_specs[options.get("returns", "tensor")],
                auto_partition=True,
                schedule=schedule,
                virtual_pipeline_size=virtual,
            )
            loss = pipeline.run_train(**make_batch(size=24))
            results.append((loss, {name: it.grad for name, it in pipeline.local_named_parameters()}))
        return results

    by_rank = run_ranks(train, pipeline_size)

    for case, results in zip(CASES, zip(*by_rank, strict=True), strict=True):
        assert_same_as_one_process(results, make_model(num_layers=8, **case[2]), make_batch(size=24))
