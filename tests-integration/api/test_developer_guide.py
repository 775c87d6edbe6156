"""The developer guide's samples as they stand there, one after the other and as a program under torchrun.

Filled in are models, data and sizes.
"""

import textwrap
from types import SimpleNamespace

import neuronx_distributed as nxd
import pytest
import torch
from neuronx_distributed.parallel_layers import mappings
from nxd_engine.models import LlamaDecoderLayer, LlamaForCausalLM
from nxd_layers import CoreAttention, RMSNorm
from nxd_testing import run_torchrun
from sample_sizes import SIZES, tokens

CONFIG_OF_EVERYTHING = """
nxd_config = nxd.neuronx_distributed_config(
    tensor_parallel_size=args.tensor_parallel_size,
    pipeline_parallel_size=args.pipeline_parallel_size,
    pipeline_config={
        "transformer_layer_cls": LlamaDecoderLayer,
        "num_microbatches": args.num_microbatches,
        "output_loss_value_spec": (True, False),
        "input_names": ["input_ids", "attention_mask", "labels"],
        "pipeline_cuts": pipeline_cuts,
        "trace_file_path": args.trace_file_path,
        "param_init_fn": None,
        "leaf_module_cls": [LlamaRMSNorm.__name__],
        "autowrap_modules": [mappings],
        "use_zero1_optimizer": args.use_zero1_optimizer > 0,
        "use_optimizer_wrapper": True,
    },
    optimizer_config={
        "zero_one_enabled": args.use_zero1_optimizer > 0,
        "grad_clipping": True,
        "max_grad_norm": 1.0,
    },
    sequence_parallel=args.use_sequence_parallel,
    activation_checkpoint_config=CoreAttention if args.use_selective_checkpoint > 0 else "full",
    model_init_config=model_init_config,
)
"""
MODEL_WITH_CONFIG = """
model = nxd.initialize_parallel_model(nxd_config, get_model, config)
"""
OPTIMIZER_WITH_GROUPS = """
optimizer = nxd.initialize_parallel_optimizer(
    nxd_config, torch.optim.AdamW, param_groups, lr=args.lr, betas=(args.beta1, args.beta2), weight_decay=args.weight_decay
)
"""  # noqa: E501
STEP_OF_PIPELINE = """
loss = model.run_train(*inputs)
"""
STEP_WITHOUT_PIPELINE = """
loss = model(*inputs)
loss.backward()
"""
SHORTCUTS = """
model.local_module()
model.dtype  # get model's dtype
model.config  # get model's config
"""
GRAD_NORM = """
# It's a XLA tensor
optimizer.grad_norm
"""
SAVE = """
# saving checkpoint
nxd.save_checkpoint(
    "ckpts",
    nxd_config=nxd_config,
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    user_content={"total_steps": total_steps},
)
"""
LOAD = """
# loading checkpoint (auto-resume)
user_content = nxd.load_checkpoint(
    "ckpts",
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
)
"""
# What a program of the developer guide has around its samples.
FILLED_IN = """
from types import SimpleNamespace

import neuronx_distributed as nxd
import torch
from neuronx_distributed.parallel_layers import mappings
from nxd_layers import CoreAttention
from nxd_layers import RMSNorm as LlamaRMSNorm
from nxd_engine.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM


class Model(LlamaForCausalLM):
    def forward(self, input_ids, attention_mask, labels):
        return super().forward(input_ids, labels), attention_mask


def get_model(config):
    torch.manual_seed(seed)
    return Model(config, sequence_parallel=args.use_sequence_parallel)


args = SimpleNamespace(
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    num_microbatches=2,
    trace_file_path=None,
    use_zero1_optimizer=1,
    use_sequence_parallel=True,
    use_selective_checkpoint=0,
    lr=1e-3,
    beta1=0.9,
    beta2=0.95,
    weight_decay=0.1,
)
pipeline_cuts = ["model.layers.0"]
model_init_config = {"sequential_move_factor": 11, "meta_device_init": False, "param_init_fn": None}
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
inputs = (ids, torch.ones_like(ids), ids.roll(-1, dims=1))
"""
BUILD = f"""
{CONFIG_OF_EVERYTHING}
{MODEL_WITH_CONFIG}
param_groups = model.parameters()
{OPTIMIZER_WITH_GROUPS}
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
"""
TRAIN = f"""
losses = []
for total_steps in range(1, 3):
{textwrap.indent(STEP_OF_PIPELINE, "    ")}
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    losses.append(None if loss is None else loss.item())
"""
PROGRAM = f"""
{FILLED_IN}
seed = 0
{BUILD}{TRAIN}{SAVE}{TRAIN}
without_stop, seed = losses, 1
{BUILD}{LOAD}{TRAIN}
line = " ".join(map(str, [user_content["total_steps"], losses == without_stop, losses != [None, None]]))
print(line + "\\n", end="", flush=True)  # in one piece: four ranks print
nxd.parallel_state.destroy_model_parallel()
"""


class ModelOfSample(LlamaForCausalLM):
    """Takes the three inputs of the sample and returns the loss first, as its `output_loss_value_spec` says."""

    def forward(self, input_ids, attention_mask, labels):
        return super().forward(input_ids, labels), attention_mask


def names_of_developer_guide(args: SimpleNamespace, cuts: list[str] | None, model_class: type) -> dict[str, object]:
    return {
        "nxd": nxd,
        "torch": torch,
        "args": args,
        "mappings": mappings,
        "LlamaDecoderLayer": LlamaDecoderLayer,
        "LlamaRMSNorm": RMSNorm,
        "CoreAttention": CoreAttention,
        "pipeline_cuts": cuts,
        "model_init_config": {"sequential_move_factor": 11, "meta_device_init": False, "param_init_fn": None},
        "config": SIZES,
        "get_model": lambda config: model_class(config, sequence_parallel=args.use_sequence_parallel),
    }


def arguments(**changed) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "num_microbatches": 2,
            "trace_file_path": None,
            "use_zero1_optimizer": 1,
            "use_sequence_parallel": True,
            "use_selective_checkpoint": 0,
            "lr": 1e-3,
            "beta1": 0.9,
            "beta2": 0.95,
            "weight_decay": 0.1,
        }
        | changed
    )


def run_developer_guide(selective: int) -> tuple[list[float | None], float]:
    torch.manual_seed(0)
    args = arguments(use_selective_checkpoint=selective)
    names = names_of_developer_guide(args, ["model.layers.1"], ModelOfSample)
    exec(CONFIG_OF_EVERYTHING, names)
    exec(MODEL_WITH_CONFIG, names)
    model = names["model"]
    names["param_groups"] = [
        {"params": [p for _, p in model.named_parameters() if p.ndim > 1]},
        {"params": [p for _, p in model.named_parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    exec(OPTIMIZER_WITH_GROUPS, names)
    ids = tokens(8)
    names["inputs"] = (ids, torch.ones_like(ids), ids.roll(-1, dims=1))
    losses = []
    for _ in range(3):
        exec(STEP_OF_PIPELINE, names)
        names["optimizer"].step()
        losses.append(None if names["loss"] is None else float(names["loss"]))
    exec(SHORTCUTS, names)
    exec(GRAD_NORM, names)
    nxd.parallel_state.destroy_model_parallel()
    return losses, float(names["optimizer"].grad_norm)


def test_developer_guide_trains_with_every_technique_at_once(run_ranks):
    by_rank = run_ranks(lambda: [run_developer_guide(selective) for selective in (0, 1)], 4)

    for full, selective in by_rank:
        assert full == selective
    assert [losses[0] is None for (losses, _), _ in by_rank] == [True, True, False, False]
    (losses, norm), _ = by_rank[-1]
    assert losses[0] - losses[-1] > 0.01
    assert norm > 0


def test_plain_forward_and_backward_of_the_developer_guide_is_run_train(run_ranks):
    def run():
        ids = tokens(8)
        torch.manual_seed(0)
        names = {"nxd": nxd, "config": SIZES, "get_model": LlamaForCausalLM, "inputs": (ids, ids.roll(-1, dims=1))}
        names["nxd_config"] = nxd.neuronx_distributed_config(tensor_parallel_size=2)
        exec(MODEL_WITH_CONFIG, names)
        exec(STEP_WITHOUT_PIPELINE, names)
        called = [parameter.grad.clone() for parameter in names["model"].parameters()]
        names["model"].zero_grad()
        exec(STEP_OF_PIPELINE, names)
        return all(torch.equal(a, p.grad) for a, p in zip(called, names["model"].parameters(), strict=True))

    assert run_ranks(run, 2) == [True, True]


def test_shortcuts_of_a_model_of_transformers_are_its_own(run_ranks):
    transformers = pytest.importorskip("transformers", reason="needs a model of it: pip install transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, name_or_path="a/folder")

    def run():
        pipeline = {"auto_partition": True, "num_microbatches": 2}
        names = {"nxd": nxd, "config": config, "get_model": transformers.LlamaForCausalLM}
        names["nxd_config"] = nxd.neuronx_distributed_config(pipeline_parallel_size=2, pipeline_config=pipeline)
        exec(MODEL_WITH_CONFIG, names)
        exec(SHORTCUTS, names)
        model = names["model"]
        return model.name_or_path, model.dtype, model.config.hidden_size, model.run_eval(input_ids=tokens(8)) is None

    first, last = run_ranks(run, 2)

    assert first == ("a/folder", torch.float32, 32, True)
    assert last == ("a/folder", torch.float32, 32, False)


def test_program_resumes_under_torchrun_with_every_technique_at_once(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)

    result = run_torchrun(["train.py"], 4)

    assert result.returncode == 0, result.stderr
    assert sorted(line for line in result.stdout.splitlines() if line.startswith("2 ")) == [
        *["2 True False"] * 2,
        *["2 True True"] * 2,
    ]
