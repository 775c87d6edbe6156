"""`NxDOptimizer.clip_grad_norm` before `step` trains like `torch.nn.utils.clip_grad_norm_` in one process.

Three steps in float64: the norms, and the weights after them. SGD without momentum shows a wrong scale of gradients,
which AdamW hides. The second step is not clipped, since its `max_norm` is inf.
"""

import math
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import neuronx_distributed as nxd
import pytest
import torch
from nxd_engine.checkpoints.state import logical_name
from nxd_engine.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from nxd_parity import InFloat64
from nxd_state import destroy_model_parallel, get_group, whole_parameters
from nxd_testing import assemble_logical, logical_pieces
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

MAX_NORMS = (0.5, math.inf, 0.1)
SAMPLES, LENGTH, VOCABULARY = 8, 8, 48
RTOL = 1e-10
OPTIMIZERS = {"SGD": (SGD, {"lr": 0.3}), "AdamW": (AdamW, {"lr": 1e-2})}


@dataclass(frozen=True, kw_only=True)
class Layout:
    ranks: int = 2
    stage: int = 0
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    model: str = "llama"
    by_hand: bool = False  # the script calls backward, once for each half of its batch


LAYOUTS = {
    "TP 2 + SP": Layout(tp=2, sequence_parallel=True),
    "PP 2": Layout(pp=2),
    "DP 2": Layout(),
    "DP 2, ZeRO-1": Layout(stage=1),
    "DP 2, ZeRO-2": Layout(stage=2),
    "DP 2, ZeRO-3": Layout(stage=3),
    "CP 2": Layout(cp=2),
    "EP 2": Layout(ep=2, model="mixtral"),
    "EP 2, ZeRO-1": Layout(ep=2, stage=1, model="mixtral"),
    "TP 2 x DP 2, ZeRO-1": Layout(ranks=4, tp=2, stage=1),
    "TP 2 + SP x DP 2, ZeRO-3": Layout(ranks=4, tp=2, sequence_parallel=True, stage=3),
    "PP 2 x DP 2, ZeRO-1": Layout(ranks=4, pp=2, stage=1),
    "TP 2 x PP 2": Layout(ranks=4, tp=2, pp=2),
    "DP 2, accumulated": Layout(by_hand=True),
    "TP 2 + SP, accumulated": Layout(tp=2, sequence_parallel=True, by_hand=True),
    "DP 2, ZeRO-1, accumulated": Layout(stage=1, by_hand=True),
    "DP 2, ZeRO-2, accumulated": Layout(stage=2, by_hand=True),
    "DP 2, ZeRO-3, accumulated": Layout(stage=3, by_hand=True),
    "TP 2 x DP 2, ZeRO-1, accumulated": Layout(ranks=4, tp=2, stage=1, by_hand=True),
}
QUICK = {
    ("TP 2 + SP", "SGD"),
    ("PP 2", "SGD"),
    ("DP 2, ZeRO-3", "AdamW"),
    ("EP 2", "SGD"),
    ("TP 2 x DP 2, ZeRO-1", "SGD"),
    ("DP 2, accumulated", "SGD"),
    ("DP 2, ZeRO-2, accumulated", "SGD"),
}
CASES = [
    pytest.param(layout, optimizer, marks=() if (layout, optimizer) in QUICK else pytest.mark.slow)
    for layout in LAYOUTS
    for optimizer in OPTIMIZERS
]


def make_model(name: str, *, sequence_parallel: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    if name == "mixtral":
        from hf_survey.architectures import tiny_model

        return tiny_model(name)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config, sequence_parallel=sequence_parallel, dtype=torch.float64)


def batches(model: str, replica: int = 0, num_replicas: int = 1) -> list[dict[str, torch.Tensor]]:
    shape = (len(MAX_NORMS), SAMPLES, LENGTH + 1)
    tokens = torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    own = [step.chunk(num_replicas)[replica] for step in tokens]
    shift = 1 if model == "llama" else 0
    return [{"input_ids": step[:, :-1], "labels": step[:, shift : LENGTH + shift]} for step in own]


def loss_of(output) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


def make(layout: Layout, optimizer: str, *, grad_clipping: bool = False, **mixed_precision):
    """The model and optimizer of the training API."""
    pipeline = {"num_microbatches": 1 if layout.sequence_parallel else 2, "input_names": ["input_ids", "labels"]}
    if layout.model == "llama":
        pipeline["transformer_layer_cls"] = LlamaDecoderLayer
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=layout.tp,
        pipeline_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_parallel_size=layout.ep,
        pipeline_config=pipeline | ({"auto_partition": True} if layout.pp > 1 else {}),
        optimizer_config={"zero_stage": layout.stage, "grad_clipping": grad_clipping},
        mixed_precision_config=mixed_precision,
        sequence_parallel=layout.sequence_parallel,
    )
    model = nxd.initialize_parallel_model(
        config, lambda: make_model(layout.model, sequence_parallel=layout.sequence_parallel)
    )
    cls, settings = OPTIMIZERS[optimizer]
    return model, nxd.initialize_parallel_optimizer(config, cls, model.parameters(), **settings)


def train(layout: Layout, optimizer: str):
    """The norms, and this rank's part of the weights."""
    with InFloat64():
        model, wrapped = make(layout, optimizer)
        norms = []
        replicas = get_group("dp")
        for max_norm, batch in zip(MAX_NORMS, batches(layout.model, replicas.rank, replicas.size), strict=True):
            if layout.by_hand:
                for half in range(2):
                    loss = loss_of(model(**{name: it.chunk(2)[half] for name, it in batch.items()}))
                    (loss / 2).backward()
            else:
                model.run_train(**batch)
            norm = wrapped.clip_grad_norm(max_norm)
            wrapped.step()
            assert wrapped.grad_norm is norm
            wrapped.zero_grad()
            norms.append(float(norm))
        with whole_parameters(model.parameters()):
            weights = logical_pieces((name, p, p) for name, p in model.named_parameters())
        destroy_model_parallel()
    return norms, weights


@cache
def one_process(model_name: str, optimizer: str):
    with InFloat64():
        model = make_model(model_name)
        cls, settings = OPTIMIZERS[optimizer]
        plain, norms = cls(model.parameters(), **settings), []
        for max_norm, batch in zip(MAX_NORMS, batches(model_name), strict=True):
            loss_of(model(**batch)).backward()
            norms.append(float(clip_grad_norm_(model.parameters(), max_norm)))
            plain.step()
            plain.zero_grad()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("layout", "optimizer"), CASES)
def test_clipped_steps_equal_those_of_torch_in_one_process(run_ranks, layout, optimizer):
    norms, weights = one_process(LAYOUTS[layout].model, optimizer)
    assert min(norms) > 0.5  # each but the second step is clipped

    ranks = run_ranks(train, LAYOUTS[layout].ranks, LAYOUTS[layout], optimizer)

    for found, _ in ranks:
        assert found == pytest.approx(norms, rel=RTOL)
    assembled = assemble_logical([pieces for _, pieces in ranks])
    found_names = {logical_name(*name.split(":")) if ":" in name else name: it for name, it in assembled.items()}
    assert found_names.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(found_names[name], tensor, rtol=RTOL, atol=1e-12, msg=lambda t, n=name: f"{n}: {t}")


STAGES = pytest.mark.parametrize("stage", [0, 1])
AGAIN = "this step's gradients have been clipped; call step\\(\\) or zero_grad\\(\\)"


@STAGES
def test_second_call_and_further_gradients_are_refused_until_zero_grad(run_ranks, stage):
    def job():
        with InFloat64():
            model, optimizer = make(Layout(stage=stage), "SGD")
            batch, _, other = batches("llama", get_group("dp").rank, 2)
            before = [it.clone() for it in model.parameters()]
            model.run_train(**other)
            optimizer.clip_grad_norm(1.0)

            with pytest.raises(RuntimeError, match=r"clip_grad_norm\(\) cannot be called now: " + AGAIN):
                optimizer.clip_grad_norm(1.0)
            with pytest.raises(RuntimeError, match=r"step\(closure\) cannot be called now: " + AGAIN):
                optimizer.step(lambda: None)
            with pytest.raises(RuntimeError, match=AGAIN):
                optimizer.synchronize()
            with pytest.raises(RuntimeError, match=AGAIN):
                optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
            with pytest.raises(RuntimeError, match=AGAIN):
                model(**batch).backward()
            optimizer.zero_grad()
            assert all(torch.equal(it, old) for it, old in zip(model.parameters(), before, strict=True))

            model.run_train(**batch)
            norm = optimizer.clip_grad_norm(MAX_NORMS[0])
            optimizer.step()
            destroy_model_parallel()
            return float(norm)

    expected = one_process("llama", "SGD")[0][0]

    assert run_ranks(job, 2) == [pytest.approx(expected, rel=RTOL)] * 2


@STAGES
def test_overflow_with_loss_scaling_skips_the_step_and_an_unscaled_norm_is_returned(run_ranks, stage):
    def job():
        with InFloat64():
            model, optimizer = make(Layout(stage=stage), "SGD", use_loss_scaling=True)
            batch = batches("llama", get_group("dp").rank, 2)[0]
            before = [it.clone() for it in model.parameters()]
            optimizer.loss_scaler.scale_factor = math.inf
            model.run_train(**batch)
            overflowed = float(optimizer.clip_grad_norm(MAX_NORMS[0]))
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.loss_scaler.skipped_steps == 1
            assert all(torch.equal(it, old) for it, old in zip(model.parameters(), before, strict=True))

            optimizer.loss_scaler.scale_factor = 1024.0
            model.run_train(**batch)
            optimizer.clip_grad_norm(MAX_NORMS[0])
            optimizer.zero_grad()  # dropped
            model.run_train(**batch)
            norm = float(optimizer.clip_grad_norm(MAX_NORMS[0]))
            optimizer.step()
            change = sum((it - old).square().sum() for it, old in zip(model.parameters(), before, strict=True))
            destroy_model_parallel()
            return overflowed, norm, float(change) ** 0.5

    expected = one_process("llama", "SGD")[0][0]

    for overflowed, norm, change in run_ranks(job, 2):
        assert not math.isfinite(overflowed)
        assert norm == pytest.approx(expected, rel=RTOL)
        assert change == pytest.approx(0.3 * MAX_NORMS[0], rel=1e-5)


@STAGES
def test_config_that_clips_in_step_and_wrong_norms_are_refused(run_ranks, stage):
    def job():
        _, optimizer = make(Layout(stage=stage), "SGD", grad_clipping=True)
        with pytest.raises(RuntimeError, match=r"max_grad_norm=1.0 already; .* set grad_clipping=False"):
            optimizer.clip_grad_norm(1.0)
        destroy_model_parallel()
        _, optimizer = make(Layout(stage=stage), "SGD")
        with pytest.raises(ValueError, match=r"max_norm=-1.0 must be zero or more"):
            optimizer.clip_grad_norm(-1.0)
        destroy_model_parallel()

    run_ranks(job, 2)
