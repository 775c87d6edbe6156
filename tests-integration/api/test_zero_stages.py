"""Every ZeRO stage, composed with every other axis, trains like one process: losses, norms, weights and states.

Ten steps of AdamW or Muon in float64. The states hold every gradient: `exp_avg` and the momentum are means of them.
"""

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import neuronx_distributed as nxd
import pytest
import torch
from nxd_engine.checkpoints.optimizer_state import optimizer_state
from nxd_engine.checkpoints.state import OPTIMIZER_PREFIX, logical_name
from nxd_engine.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from nxd_lora import LoraConfig, LoraModel
from nxd_optim import Muon, muon_parameter_groups
from nxd_parity import InFloat64
from nxd_pipeline import Microbatches
from nxd_state import destroy_model_parallel, get_group, owned_range, whole_parameters
from nxd_testing import assemble_logical, logical_pieces

pytest.importorskip("transformers", reason="some of the models are of transformers: pip install transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

OF_EXPERTS = ("mixtral", "gpt_oss")
MODELS = ("llama", "tied", "qwen3", "gemma3_text", "mixtral", "gpt_oss")
TEXT_MODELS = (*MODELS, "phi3")
VISION = ("gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "mllama", "mistral3", "llava_next", "internvl", "idefics3")
VISION += ("paligemma", "glm4v", "aya_vision", "cohere2_vision", "granite4_vision")
STEPS, SAMPLES, LENGTH, VOCABULARY = 10, 8, 8, 48
STEPS_WITHOUT_PICTURES = (0, 4)  # whose gradients of a vision tower are None, so that AdamW leaves it alone
RTOL = 1e-10
STATES = ("/exp_avg", "/exp_avg_sq", "/momentum_buffer")


@dataclass(frozen=True, kw_only=True)
class Layout:
    stage: int = 3
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    group: int | None = None
    reshard: bool | int | None = None
    checkpointing: str | None = None
    microbatches: int = 2
    schedule: str = "1f1b"
    model: str = "llama"
    lora: bool = False
    optimizer: str = "adamw"


def make_model(name: str, *, sequence_parallel: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    if name in ("llama", "tied"):
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=name == "tied",
        )
        return LlamaForCausalLM(config, sequence_parallel=sequence_parallel, dtype=torch.float64)
    from hf_survey.architectures import tiny_model
    from hf_survey.vision import VISION_FAMILIES, vision_model

    return vision_model(name) if name in VISION_FAMILIES else tiny_model(name)


def lora_config(model: str) -> LoraConfig:
    if model in OF_EXPERTS:
        targets = {"target_modules": ["q_proj", "v_proj"], "target_parameters": ["experts.down_proj"]}
    else:
        targets = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
    return LoraConfig(lora_rank=2, lora_alpha=4, **targets)


def batches(model: str, replica: int = 0, num_replicas: int = 1, num_microbatches: int = 1) -> list[dict]:
    """A replica's inputs of each step; those of a vision-language model are split into microbatches."""
    if model not in TEXT_MODELS:
        from hf_survey.vision_batch import vision_inputs

        rows = [torch.arange(SAMPLES).roll(step).chunk(num_replicas)[replica] for step in range(STEPS)]
        microbatches = [[it.tolist() for it in of_step.chunk(num_microbatches)] for of_step in rows]
        return [
            vision_inputs(model, parts, pictures=step not in STEPS_WITHOUT_PICTURES)
            for step, parts in enumerate(microbatches)
        ]
    tokens = torch.randint(3, VOCABULARY, (STEPS, SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    own = [step.chunk(num_replicas)[replica] for step in tokens]
    shift = 1 if model in ("llama", "tied") else 0
    return [{"input_ids": step[:, :-1], "labels": step[:, shift : LENGTH + shift]} for step in own]


def config_of(layout: Layout) -> dict:
    input_names = dict.fromkeys(name for step in batches(layout.model) for name in step)
    pipeline = {"num_microbatches": layout.microbatches, "input_names": list(input_names)}
    if layout.model in ("llama", "tied"):
        pipeline["transformer_layer_cls"] = LlamaDecoderLayer
    if layout.pp > 1:
        pipeline |= {"auto_partition": True, "schedule": layout.schedule}
        if layout.schedule in ("zb-v", "v-half"):
            pipeline["virtual_pipeline_size"] = 2
    return nxd.neuronx_distributed_config(
        tensor_parallel_size=layout.tp,
        pipeline_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_parallel_size=layout.ep,
        pipeline_config=pipeline,
        optimizer_config={
            "zero_stage": layout.stage,
            "shard_group_size": layout.group,
            "reshard_after_forward": layout.reshard,
            "max_grad_norm": 0.5,
        },
        activation_checkpoint_config=layout.checkpointing,
        sequence_parallel=layout.sequence_parallel,
        lora_config=lora_config(layout.model) if layout.lora else None,
    )


def optimizer_of(name: str, model: torch.nn.Module) -> tuple[type[torch.optim.Optimizer], list]:
    if name == "muon":
        return Muon, muon_parameter_groups(model)
    return torch.optim.AdamW, [it for it in model.parameters() if it.requires_grad]


def train(layout: Layout) -> tuple[list[float], list[float], list, dict]:
    with InFloat64():
        config = config_of(layout)
        model = nxd.initialize_parallel_model(
            config, lambda: make_model(layout.model, sequence_parallel=layout.sequence_parallel)
        )
        cls, parameters = optimizer_of(layout.optimizer, model)
        optimizer = nxd.initialize_parallel_optimizer(config, cls, parameters, lr=1e-2)
        replicas = get_group("dp")
        losses, norms = [], []
        for batch in batches(layout.model, replicas.rank, replicas.size, layout.microbatches):
            loss = model.run_train(**batch)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(None if loss is None else loss.item())
            norms.append(float(optimizer.grad_norm))
        with whole_parameters(model.parameters()):
            weights = logical_pieces((name, p, p) for name, p in model.named_parameters())
        states = optimizer_state(model.pipeline if layout.pp > 1 else model.local_module(), optimizer.optimizer)
        parts = [
            (name, tuple(it.global_shape), [(shard.box.offsets, shard.tensor.clone()) for shard in it.shards])
            for name, it in states.items()
            if name.endswith(STATES)
        ]
        destroy_model_parallel()
    return losses, norms, weights, parts


def one_process(layout: Layout):
    with InFloat64():
        model = make_model(layout.model)
        if layout.lora:
            LoraModel(model, lora_config(layout.model))
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        cls, parameters = optimizer_of(layout.optimizer, model)
        optimizer = cls(parameters, lr=1e-2)
        losses, norms = [], []
        for batch in batches(layout.model):
            output = model(**{name: it[0] if isinstance(it, Microbatches) else it for name, it in batch.items()})
            loss = output if isinstance(output, torch.Tensor) else output.loss
            loss.backward()
            losses.append(loss.item())
            norms.append(float(torch.nn.utils.clip_grad_norm_([p for _, p in trained], 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        weights = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
        states = {
            f"{name}/{key}": value
            for name, p in trained
            if p in optimizer.state
            for key, value in optimizer.state[p].items()
            if f"/{key}" in STATES
        }
    return losses, norms, weights, states


def assert_close(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    scale = wanted.abs().max().item()
    torch.testing.assert_close(found, wanted, rtol=RTOL, atol=RTOL * scale + 1e-18, msg=lambda text: f"{name}: {text}")


@cache
def expected_of(model: str, lora: bool, optimizer: str = "adamw"):
    return one_process(Layout(model=model, lora=lora, optimizer=optimizer))


def assert_equal(outcomes, expected) -> None:
    losses, norms, weights, states = expected
    for step, wanted in enumerate(losses):
        found = [losses_of_rank[step] for losses_of_rank, *_ in outcomes if losses_of_rank[step] is not None]
        assert sum(found) / len(found) == pytest.approx(wanted, rel=RTOL)
    for _, norms_of_rank, _, _ in outcomes:
        assert norms_of_rank == pytest.approx(norms, rel=RTOL)
    assembled = assemble_logical([of_rank for _, _, of_rank, _ in outcomes])
    for name, tensor in assembled.items():
        logical = logical_name(*name.split(":")) if ":" in name else name
        assert_close(name, tensor, weights[logical])
    assert weights.keys() - {logical_name(*n.split(":")) if ":" in n else n for n in assembled} <= {"lm_head.weight"}
    found_states: dict[str, torch.Tensor] = {}
    for *_, parts in outcomes:
        for name, shape, shards in parts:
            whole = found_states.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
            for offsets, values in shards:
                whole[tuple(slice(a, a + n) for a, n in zip(offsets, values.shape, strict=True))] = values
    for name, tensor in states.items():
        if OPTIMIZER_PREFIX + name in found_states or not name.startswith("lm_head"):
            assert_close(name, found_states[OPTIMIZER_PREFIX + name], tensor)


def make_on_meta(seed: int, stage: int, pp: int = 1):
    """A model made without memory; the weights, and the most bytes of parameters that were whole at a time."""
    most = [0]
    made: list[LlamaForCausalLM] = []

    def make_and_keep():
        made.append(make_model("llama"))
        return made[0]

    def fill(module: torch.nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            torch.nn.init.normal_(parameter)
        whole = [it for it in made[0].parameters() if not it.is_meta and owned_range(it) is None]
        most[0] = max(most[0], sum(it.nbytes for it in whole))

    pipeline = {
        "num_microbatches": 2,
        "input_names": ["input_ids", "labels"],
        "transformer_layer_cls": LlamaDecoderLayer,
        "auto_partition": pp > 1,
    }
    config = nxd.neuronx_distributed_config(
        pipeline_parallel_size=pp,
        pipeline_config=pipeline,
        optimizer_config={"zero_stage": stage},
        model_init_config={"meta_device_init": True, "param_init_fn": fill},
    )
    torch.manual_seed(seed)
    model = nxd.initialize_parallel_model(config, make_and_keep)
    with whole_parameters(model.parameters()):
        weights = logical_pieces((name, p, p) for name, p in model.named_parameters())
    destroy_model_parallel()
    return weights, most[0]


@pytest.mark.parametrize(("pp", "ranks"), [(1, 2), (2, 4)])
def test_model_without_memory_is_sharded_layer_by_layer(run_ranks, pp, ranks):
    expected = assemble_logical([make_on_meta(3, 0)[0]])
    model = make_model("llama")
    layer = sum(it.nbytes for it in model.model.layers[0].parameters())
    others = sum(it.nbytes for it in model.parameters()) - 4 * layer

    results = run_ranks(lambda: make_on_meta(3, 3, pp), ranks)

    found = assemble_logical([weights for weights, _ in results])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], it) for name, it in expected.items())
    for _, most in results:
        assert layer <= most <= layer + others


ZB_V = {"pp": 2, "microbatches": 4, "schedule": "zb-v"}
AXES = {
    "DP 2": (2, {}),
    "DP 4": (4, {}),
    "TP 2 x DP 2": (4, {"tp": 2}),
    "TP 2 + SP x DP 2": (4, {"tp": 2, "sequence_parallel": True, "microbatches": 1}),
    "CP 2 x DP 2": (4, {"cp": 2, "microbatches": 1}),
    "EP 2": (2, {"ep": 2}),
    "EP 2 of 4 replicas": (4, {"ep": 2}),
    "PP 2 x DP 2": (4, {"pp": 2, "microbatches": 4}),
    "PP 2 x DP 2, ZB-V": (4, ZB_V),
    "TP 2 x PP 2 x DP 2": (8, {"tp": 2, "pp": 2}),
}
STAGES = {
    "ZeRO-1": {"stage": 1},
    "ZeRO-2": {"stage": 2},
    "ZeRO-3": {},
    "ZeRO-3, recomputed": {"checkpointing": "full"},
    "ZeRO-3, kept": {"reshard": False},
    "ZeRO-3, shared by 2": {"reshard": 2},
    "hybrid ZeRO-1": {"stage": 1, "group": 1},
    "hybrid ZeRO-3": {"group": 2},
}


def _fits(axes: str, stage: str, model: str) -> bool:
    """Whether there are such experts, sequence-parallel layers and groups."""
    if "EP" in axes and model not in OF_EXPERTS:
        return False
    replicas = 4 if axes in ("DP 4", "EP 2 of 4 replicas", "CP 2 x DP 2") else 2
    return replicas == 4 or stage not in ("hybrid ZeRO-3",)


def _grid(models: tuple[str, ...], stages: tuple[str, ...], adapted: tuple[str, ...], axes=tuple(AXES)) -> list:
    return [
        pytest.param(axis, stage, model, lora, id=f"{axis}, {stage}, {model}{' with LoRA' if lora else ''}")
        for model in models
        for lora in ((False, True) if model in adapted else (False,))
        for stage in stages
        for axis in axes
        if _fits(axis, stage, model)
    ]


GRID = _grid(MODELS, tuple(STAGES), MODELS)
GRID_OF_VISION = _grid(
    VISION,
    ("ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3, recomputed"),
    adapted=VISION,
    axes=("DP 2", "TP 2 x DP 2", "PP 2 x DP 2", "TP 2 x PP 2 x DP 2", "TP 2 + SP x DP 2", "CP 2 x DP 2"),
)
GRID_OF_MUON = _grid(
    ("llama", "phi3", "qwen3", "gemma3_text", "mixtral", "gpt_oss"),
    ("ZeRO-1", "ZeRO-2", "ZeRO-3", "hybrid ZeRO-1", "hybrid ZeRO-3"),
    adapted=("llama", "mixtral"),
)


@pytest.mark.sample(6)
@pytest.mark.parametrize(("axes", "stage", "model", "lora"), GRID)
def test_every_stage_trains_like_one_process(run_ranks, axes, stage, model, lora):
    ranks, degrees = AXES[axes]
    layout = Layout(**degrees, **STAGES[stage], model=model, lora=lora)

    outcomes = run_ranks(lambda: train(layout), ranks)

    assert_equal(outcomes, expected_of(model, lora))


@pytest.mark.sample(6)
@pytest.mark.parametrize(("axes", "stage", "model", "lora"), GRID_OF_VISION)
def test_vision_language_model_trains_like_one_process(run_ranks, axes, stage, model, lora):
    pytest.importorskip("torchvision", reason="processors of images need it: pip install torchvision")
    ranks, degrees = AXES[axes]
    layout = Layout(**degrees, **STAGES[stage], model=model, lora=lora)

    outcomes = run_ranks(lambda: train(layout), ranks)

    assert_equal(outcomes, expected_of(model, lora))


@pytest.mark.sample(6)
@pytest.mark.parametrize(("axes", "stage", "model", "lora"), GRID_OF_MUON)
def test_muon_trains_like_one_process(run_ranks, axes, stage, model, lora):
    ranks, degrees = AXES[axes]
    layout = Layout(**degrees, **STAGES[stage], model=model, lora=lora, optimizer="muon")

    outcomes = run_ranks(lambda: train(layout), ranks)

    assert_equal(outcomes, expected_of(model, lora, "muon"))
