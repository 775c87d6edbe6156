"""From the documented config to the optimizer's step, every layout computes what one process does, in float64.

Losses, gradient norms and trained weights are compared with plain PyTorch. All layouts of one number of ranks run in
one job. The Llama is this repository's; one of transformers stands for models that know nothing of these packages, and
one whose heads and vocabulary no even number of ranks divides, for those that are padded.
"""

from dataclasses import dataclass

import neuronx_distributed as nxd
import pytest
import torch
from nxd_engine.checkpoints.state import logical_name
from nxd_engine.models import LlamaDecoderLayer, LlamaForCausalLM
from nxd_layers import CoreAttention
from nxd_lora import LoraConfig, LoraModel
from nxd_state import destroy_model_parallel, get_group, get_shard_spec
from nxd_testing import LogicalPiece, assemble_logical, logical_pieces

STEPS, GLOBAL_BATCH, SEQUENCE = 2, 16, 8
MAX_NORM = 0.5
RTOL = 1e-10
HUGGING_FACE_LOSS_RTOL = 1e-6  # transformers takes losses in float32, so that they depend on how a batch is cut


@dataclass(frozen=True, kw_only=True)
class Layout:
    tp: int = 1
    pp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    zero1: bool = False
    checkpointing: str | type | None = None
    microbatches: int | None = None  # None: no pipeline_config; a pipeline has 4
    pipeline: tuple[tuple[str, object], ...] = ()
    on_meta: bool = False
    # what one process has to know as well
    model: str = "llama"
    lora: bool = False
    clipping: bool = True


TWO_RANKS = [
    Layout(),
    Layout(zero1=True, clipping=False),
    Layout(lora=True),
    Layout(tp=2, model="tied"),
    Layout(tp=2, sequence_parallel=True, checkpointing="full"),
    Layout(tp=2, sequence_parallel=True, zero1=True, microbatches=2),
    Layout(tp=2, sequence_parallel=True, lora=True),
    Layout(pp=2, model="tied", zero1=True),
    Layout(pp=2, lora=True, checkpointing=CoreAttention),
    Layout(pp=2, model="hugging face", checkpointing="full"),
    Layout(pp=2, model="hugging face", on_meta=True),
    Layout(tp=2, model="odd"),
    Layout(pp=2, model="tied", lora=True, on_meta=True),
    Layout(cp=2, model="tied", zero1=True, checkpointing="full"),
    Layout(cp=2, model="hugging face", lora=True, checkpointing="full"),
]
MORE_OF_TWO_RANKS = [
    Layout(zero1=True),
    Layout(microbatches=4),
    Layout(checkpointing="full"),
    Layout(lora=True, zero1=True),
    Layout(clipping=False),
    Layout(model="hugging face", checkpointing="full", zero1=True),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True, model="tied"),
    Layout(tp=2, checkpointing=CoreAttention),
    Layout(pp=2),
    Layout(pp=2, checkpointing="full"),
    Layout(pp=2, checkpointing=CoreAttention, pipeline=(("virtual_pipeline_size", 2),)),
    Layout(pp=2, pipeline=(("schedule", "zb-h1"),), clipping=False),
    Layout(pp=2, model="hugging face"),
    Layout(tp=2, model="odd", lora=True, checkpointing="full"),
    Layout(tp=2, model="odd", on_meta=True),
    Layout(lora=True, on_meta=True),
    Layout(pp=2, lora=True, zero1=True, pipeline=(("virtual_pipeline_size", 2),)),
    Layout(pp=2, model="hugging face", lora=True, checkpointing="full"),
]
FOUR_RANKS = [
    Layout(tp=4, sequence_parallel=True, zero1=True, checkpointing="full"),
    Layout(tp=2, zero1=True, lora=True),
    Layout(tp=2, pp=2, sequence_parallel=True, checkpointing="full"),
    Layout(tp=2, pp=2, sequence_parallel=True, zero1=True, model="tied"),
    Layout(pp=2, model="hugging face", zero1=True, checkpointing="full"),
    Layout(pp=4, model="tied", zero1=True, checkpointing="full"),
    Layout(tp=2, pp=2, model="odd", lora=True, zero1=True, checkpointing="full"),
    Layout(tp=2, pp=2, model="odd", lora=True, on_meta=True),
    Layout(cp=2, tp=2, sequence_parallel=True, checkpointing=CoreAttention),
    Layout(cp=2, pp=2, zero1=True),
]
MORE_OF_FOUR_RANKS = [
    Layout(tp=4),
    Layout(tp=2, sequence_parallel=True),
    Layout(tp=2, sequence_parallel=True, zero1=True),
    Layout(tp=2, pp=2, lora=True, checkpointing=CoreAttention),
    Layout(pp=2, zero1=True, checkpointing="full"),
    Layout(pp=2, model="tied", pipeline=(("virtual_pipeline_size", 2),)),
    Layout(tp=4, model="odd", zero1=True),
    Layout(tp=2, pp=2, model="odd", on_meta=True, zero1=True),
    Layout(tp=2, pp=2, model="tied", lora=True, sequence_parallel=True, zero1=True, checkpointing="full"),
    Layout(pp=4, lora=True, on_meta=True, zero1=True),
    Layout(cp=4, model="tied"),
    Layout(cp=2, zero1=True, microbatches=2, model="hugging face"),
    Layout(cp=2, pp=2, model="hugging face", lora=True, checkpointing="full"),
]
EIGHT_RANKS = [
    Layout(tp=2, pp=2, sequence_parallel=True, zero1=True, checkpointing="full", model="tied"),
    Layout(tp=2, pp=2, sequence_parallel=True, checkpointing=CoreAttention),
    Layout(tp=4, sequence_parallel=True, zero1=True, lora=True),
    Layout(tp=2, sequence_parallel=True, microbatches=2, zero1=True),
    Layout(pp=4, zero1=True, checkpointing="full"),
    Layout(pp=2, model="hugging face", zero1=True),
    Layout(tp=2, pp=2, model="odd", zero1=True, checkpointing="full"),
    Layout(tp=2, pp=2, model="odd", lora=True, on_meta=True, zero1=True),
    Layout(tp=2, pp=4, model="tied", lora=True, sequence_parallel=True),
    Layout(cp=2, tp=2, pp=2, model="tied", sequence_parallel=True, checkpointing="full"),
    Layout(cp=4, zero1=True, lora=True),
]


@dataclass
class Outcome:
    losses: list[float | None]
    norms: list[float | None]
    weights: list[LogicalPiece]


def hugging_face_model() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers", reason="one model is of transformers: pip install transformers")
    sizes = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config).double()


@pytest.fixture
def make_model(make_config, odd_model):
    """`make_model(name, sequence_parallel=...)`."""

    def make(name: str, *, sequence_parallel: bool = False) -> torch.nn.Module:
        if name == "hugging face":
            return hugging_face_model()
        if name == "odd":
            return odd_model.make()
        config = make_config(tied=name == "tied")
        return LlamaForCausalLM(config, sequence_parallel=sequence_parallel, dtype=torch.float64)

    return make


def lora_config() -> LoraConfig:
    return LoraConfig(lora_rank=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"])


def batches(model: str) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(
        0, 23 if model == "odd" else 48, (STEPS, GLOBAL_BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1)
    )
    if model == "hugging face":  # which shifts the labels itself
        return [{"input_ids": step, "labels": step} for step in tokens]
    return [{"input_ids": step[:, :-1], "labels": step[:, 1:]} for step in tokens]


def fill(module: torch.nn.Module) -> None:
    """The same values at every layout: they depend on logical shapes only."""
    for index, parameter in enumerate(module.parameters(recurse=False)):
        spec = get_shard_spec(parameter)
        if spec is None:
            parameter.copy_(values_of(parameter.shape, index, parameter.dtype))
            continue
        logical = {name: values_of(shape, index, parameter.dtype) for name, shape in spec.logical_shapes.items()}
        spec.copy_from_logical(logical, parameter)
    for name, buffer in module.named_buffers(recurse=False):
        raise AssertionError(f"{name} of {tuple(buffer.shape)} was to keep its values")


def values_of(shape: tuple[int, ...], index: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.linspace(-0.3, 0.4, torch.Size(shape).numel(), dtype=dtype).sin().view(shape) + 0.1 * index


def pipeline_config(layout: Layout, odd_layer_cls: type) -> dict[str, object] | None:
    if layout.pp == 1 and layout.microbatches is None:
        return None
    config: dict[str, object] = {"num_microbatches": layout.microbatches or 4, "input_names": ["input_ids", "labels"]}
    if layout.model == "odd":
        config["transformer_layer_cls"] = odd_layer_cls
    elif layout.model != "hugging face":
        config["transformer_layer_cls"] = LlamaDecoderLayer
    if layout.pp > 1:
        config |= {"auto_partition": True}
    return config | dict(layout.pipeline)


def train(layout: Layout, make_model, odd_layer_cls) -> Outcome:
    nxd_config = nxd.neuronx_distributed_config(
        tensor_parallel_size=layout.tp,
        pipeline_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        pipeline_config=pipeline_config(layout, odd_layer_cls),
        optimizer_config={
            "zero_one_enabled": layout.zero1,
            "grad_clipping": layout.clipping,
            "max_grad_norm": MAX_NORM,
        },
        activation_checkpoint_config=layout.checkpointing,
        sequence_parallel=layout.sequence_parallel,
        pad_model=layout.model == "odd",
        model_init_config={"meta_device_init": layout.on_meta, "param_init_fn": fill if layout.on_meta else None},
        lora_config=lora_config() if layout.lora else None,
    )
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(
        nxd_config, make_model, layout.model, sequence_parallel=layout.sequence_parallel
    )
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    replicas = get_group("dp")
    outcome = Outcome([], [], [])
    for batch in batches(layout.model):
        own = {name: values.chunk(replicas.size)[replicas.rank] for name, values in batch.items()}
        loss = model.run_train(**own)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        outcome.losses.append(None if loss is None else float(loss))
        outcome.norms.append(None if optimizer.grad_norm is None else float(optimizer.grad_norm))
    outcome.weights = logical_pieces((name, p, p) for name, p in model.named_parameters())
    destroy_model_parallel()
    return outcome


def one_process(layout: Layout, make_model) -> tuple[list[float], list[float | None], dict[str, torch.Tensor]]:
    """The same steps with plain PyTorch."""
    torch.manual_seed(0)
    model = make_model(layout.model)
    if layout.on_meta:
        with torch.no_grad():
            for module in model.modules():
                if next(module.parameters(recurse=False), None) is not None:
                    fill(module)
        torch.manual_seed(0)  # on the meta device nothing has been drawn
    if layout.lora:
        LoraModel(model, lora_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step, batch in enumerate(batches(layout.model)):
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        optimizer.zero_grad()
        output = model(**batch)
        loss = output.loss if layout.model == "hugging face" else output
        loss.backward()
        losses.append(loss.item())
        limit = MAX_NORM if layout.clipping else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item()
        norms.append(norm if layout.clipping else None)
        optimizer.step()
    return losses, norms, {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def assert_equal_to_one_process(outcomes: list[Outcome], expected, *, loss_rtol: float) -> None:
    losses, norms, weights = expected
    for step, wanted in enumerate(losses):
        found = [outcome.losses[step] for outcome in outcomes if outcome.losses[step] is not None]
        assert sum(found) / len(found) == pytest.approx(wanted, rel=loss_rtol)
    for outcome in outcomes:
        assert (outcome.norms if norms[0] is None else pytest.approx(outcome.norms, rel=RTOL)) == norms
    found_weights = assemble_logical([outcome.weights for outcome in outcomes])
    assembled = {logical_name(*name.split(":")) if ":" in name else name: it for name, it in found_weights.items()}
    assert weights.keys() - assembled.keys() <= {"lm_head.weight"}  # tied, on one rank
    for name, tensor in assembled.items():
        scale = weights[name].abs().max().item()  # elements near zero are compared to their tensor's scale
        torch.testing.assert_close(
            tensor, weights[name], rtol=RTOL, atol=RTOL * scale, msg=lambda m, name=name: f"{name}: {m}"
        )


def check(run_ranks, make_model, odd_layer_cls, layouts: list[Layout], world: int) -> None:
    of_process = {(it.model, it.lora, it.clipping, it.on_meta): it for it in layouts}
    expected = {key: one_process(layout, make_model) for key, layout in of_process.items()}

    by_rank = run_ranks(lambda: [train(layout, make_model, odd_layer_cls) for layout in layouts], world)

    for layout, outcomes in zip(layouts, zip(*by_rank, strict=True), strict=True):
        try:
            key = (layout.model, layout.lora, layout.clipping, layout.on_meta)
            loss_rtol = HUGGING_FACE_LOSS_RTOL if layout.model == "hugging face" else RTOL
            assert_equal_to_one_process(list(outcomes), expected[key], loss_rtol=loss_rtol)
        except AssertionError as error:
            raise AssertionError(f"{layout}: {error}") from error


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("layouts", "world"),
    [
        (TWO_RANKS, 2),
        (FOUR_RANKS, 4),
        pytest.param(MORE_OF_TWO_RANKS, 2, marks=pytest.mark.slow),
        pytest.param(MORE_OF_FOUR_RANKS, 4, marks=pytest.mark.slow),
        pytest.param(EIGHT_RANKS, 8, marks=pytest.mark.slow),
    ],
    ids=["two-ranks", "four-ranks", "more-of-two-ranks", "more-of-four-ranks", "eight-ranks"],
)
def test_every_layout_trains_like_one_process(run_ranks, make_model, odd_model, layouts, world):
    check(run_ranks, make_model, odd_model.layer_cls, layouts, world)
