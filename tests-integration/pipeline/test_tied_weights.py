"""Copies of a tied weight on two stages are one weight, bit by bit, also where three replicas average their gradients.

Three, as sums of two do not depend on their order.
"""

from dataclasses import dataclass

import nxd_ckpt
import pytest
import torch
from nxd_engine.checkpoints.optimizer_state import allocate_optimizer_state, optimizer_state
from nxd_engine.checkpoints.state import model_state, saved_here
from nxd_engine.models import LlamaDecoderLayer, LlamaForCausalLM
from nxd_optim import GradientReducer, NeuronZero1Optimizer, clip_grad_norm
from nxd_pipeline import NxDPPModel
from nxd_state import get_data_parallel_group, get_group, get_pipeline_model_parallel_group, initialize_model_parallel

STEPS, MICROBATCHES, SEQUENCE = 3, 2, 16


@dataclass
class Run:
    """A pipeline in training, in float32."""

    pipeline: NxDPPModel
    optimizer: torch.optim.Optimizer
    reducer: GradientReducer | None  # None for ZeRO-1

    def step(self, number: int) -> None:
        seed = 100 * number + get_group("dp").rank
        tokens = torch.randint(0, 48, (MICROBATCHES, SEQUENCE + 1), generator=torch.Generator().manual_seed(seed))
        self.pipeline.run_train(input_ids=tokens[:, :-1], labels=tokens[:, 1:])
        if self.reducer is not None:
            self.reducer.finish()
            clip_grad_norm(self.pipeline.local_parameters(), 0.5)
        self.optimizer.step()
        (self.optimizer if self.reducer is None else self.reducer).zero_grad()

    @property
    def state(self) -> nxd_ckpt.ShardedTensor:
        return model_state(self.pipeline) | optimizer_state(self.pipeline, self.optimizer)

    @property
    def tied(self) -> torch.Tensor:
        names = ("model.embed_tokens.weight", "lm_head.weight")
        [weight] = [parameter for name, parameter in self.pipeline.local_named_parameters() if name in names]
        return weight.detach().clone()


def begin(config, *, zero1: bool) -> Run:
    torch.manual_seed(0)
    pipeline = NxDPPModel(
        LlamaForCausalLM(config),
        LlamaDecoderLayer,
        MICROBATCHES,
        input_names=["input_ids", "labels"],
        auto_partition=True,
    )
    parameters = list(pipeline.local_parameters())
    if zero1:
        groups = {
            "sharding_groups": get_data_parallel_group(as_list=True),
            "grad_norm_groups": get_pipeline_model_parallel_group(as_list=True),
        }
        optimizer = NeuronZero1Optimizer(parameters, torch.optim.AdamW, max_norm=0.5, lr=1e-2, **groups)
        optimizer.overlap_forward(pipeline)  # weights may still be on their way when the next step begins
        return Run(pipeline, optimizer, None)
    return Run(pipeline, torch.optim.AdamW(parameters, lr=1e-2), GradientReducer(parameters, bucket_bytes=5_000))


def train_and_resume(config, folder, *, zero1: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tied weight of this rank after some steps, after more, and after those more in a run that was resumed."""
    whole, resumed = begin(config, zero1=zero1), begin(config, zero1=zero1)
    for number in range(STEPS):
        whole.step(number)
    if zero1:
        whole.optimizer.wait_for_parameters()
    nxd_ckpt.save(folder, "a", saved_here(whole.pipeline, whole.state))
    whole.pipeline.synchronize_tied_weights()
    middle = whole.tied

    stored = nxd_ckpt.open_checkpoint(folder, "a").tensors
    allocate_optimizer_state(
        resumed.pipeline, resumed.optimizer, {name: (info.dtype, info.global_shape) for name, info in stored.items()}
    )
    nxd_ckpt.load(folder, "a", into=resumed.state)
    for number in range(STEPS, 2 * STEPS):
        whole.step(number)
        resumed.step(number)
    for run in (whole, resumed):
        run.pipeline.synchronize_tied_weights()
    return middle, whole.tied, resumed.tied


@pytest.mark.parametrize("zero1", [False, True], ids=["plain", "zero1"])
def test_copies_of_a_tied_weight_stay_bitwise_equal_and_resume_exactly(run_ranks, make_config, tmp_path, zero1):
    config = make_config(tied=True, num_layers=3)

    def run():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        return train_and_resume(config, tmp_path, zero1=zero1)

    (middle, trained, resumed), *others = run_ranks(run, 6)

    assert not torch.equal(middle, trained)
    assert torch.equal(trained, resumed)
    for copies in others:
        for copy, expected in zip(copies, (middle, trained, resumed), strict=True):
            assert torch.equal(copy, expected)
