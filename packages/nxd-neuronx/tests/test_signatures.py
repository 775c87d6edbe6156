"""Every name, argument and default of the documents, written out by hand, against ours and the reference's table."""

import inspect
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import pytest
import torch
from nxd_ckpt import CheckpointError
from torch.nn import init

REQUIRED = inspect.Parameter.empty
ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "docs/reference/neuronx-api.md"
TABLE_BEGINS = "| name | arguments and defaults | tested in |"

LORA = "packages/nxd-lora/tests"
STATE, LAYERS, OPTIM = "packages/nxd-state/tests", "packages/nxd-layers/tests", "packages/nxd-optim/tests"
API, TRACE = "packages/nxd-engine/tests", "packages/nxd-trace/tests"
STAGES, LIGHTNING = "tests-integration/pipeline/test_parity.py", "packages/nxd-lightning/tests"
VOID: dict[str, Any] = {}


@dataclass(frozen=True)
class Documented:
    """A documented function, method or class.

    Attributes:
        arguments: name to default, in their order.
        tested_in: where its behaviour is tested.
        variadic: kinds of further arguments that it takes.
        ours: defaults that are not the documented ones, which make no sense as they are written.
        by_name: arguments that are taken by name only.
    """

    arguments: dict[str, Any]
    tested_in: str
    variadic: str = ""
    ours: dict[str, Any] | None = None
    by_name: bool = False


LINEAR = {"sequence_parallel_enabled": False, "dtype": torch.float32, "device": None}
DOCUMENTED = {
    "parallel_state.initialize_model_parallel": Documented(
        {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}, f"{STATE}/test_parallel_state.py"
    ),
    **{
        f"parallel_state.get_{name}": Documented(VOID, f"{STATE}/test_parallel_state.py")
        for name in (
            "data_parallel_size",
            "data_parallel_rank",
            "tensor_model_parallel_size",
            "tensor_model_parallel_rank",
            "pipeline_model_parallel_size",
            "pipeline_model_parallel_rank",
        )
    },
    **{
        f"parallel_state.get_{axis}_parallel_group": Documented({"as_list": False}, f"{STATE}/test_parallel_state.py")
        for axis in ("data", "tensor_model", "pipeline_model")
    },
    "parallel_state.move_model_to_device": Documented(
        {"model": REQUIRED, "device": REQUIRED}, f"{STATE}/test_move_model.py"
    ),
    "parallel_layers.ParallelEmbedding": Documented(
        {
            "num_embeddings": REQUIRED,
            "embedding_dim": REQUIRED,
            "init_method": init.normal_,
            "dtype": torch.float32,
            "device": None,
        },
        f"{LAYERS}/test_embedding.py",
    ),
    "parallel_layers.ColumnParallelLinear": Documented(
        {"input_size": REQUIRED, "output_size": REQUIRED, "bias": True, "gather_output": True, **LINEAR},
        f"{LAYERS}/test_column_parallel_linear.py",
    ),
    "parallel_layers.RowParallelLinear": Documented(
        {
            "input_size": REQUIRED,
            "output_size": REQUIRED,
            "bias": True,
            "input_is_parallel": False,
            **LINEAR,
            "device": False,
        },
        f"{LAYERS}/test_row_parallel_linear.py",
        ours={"device": None},
    ),
    "parallel_layers.pad.pad_model": Documented(
        {"model": REQUIRED, "tp_degree": REQUIRED, "n_heads": REQUIRED, "wrapped_classes": (), "pad_hook_fn": None},
        f"{LAYERS}/test_pad_model.py",
    ),
    "parallel_layers.pad.get_number_of_extra_heads": Documented(
        {"n_heads": REQUIRED, "tp_degree": REQUIRED}, f"{LAYERS}/test_pad_model.py"
    ),
    "parallel_layers.utils.divide": Documented(
        {"numerator": REQUIRED, "denominator": REQUIRED}, f"{LAYERS}/test_pad_model.py"
    ),
    "parallel_layers.loss_functions.parallel_cross_entropy": Documented(
        {"parallel_logits": REQUIRED, "labels": REQUIRED, "label_smoothing": 0.0}, f"{LAYERS}/test_cross_entropy.py"
    ),
    "parallel_layers.save": Documented(
        {
            "state_dict": REQUIRED,
            "save_dir": REQUIRED,
            "save_serially": True,
            "save_xser": False,
            "down_cast_bf16": False,
        },
        f"{API}/test_checkpoint_shard_files.py",
    ),
    "parallel_layers.load": Documented(
        {"load_dir": REQUIRED, "model_or_optimizer": None, "model_key": "model", "load_xser": False, "sharded": True},
        f"{API}/test_checkpoint_shard_files.py",
    ),
    "parallel_layers.clip_grad_norm": Documented(
        {"parameters": REQUIRED, "max_norm": REQUIRED, "norm_type": 2}, f"{OPTIM}/test_clip_grad_norm.py"
    ),
    "pipeline.NxDPPModel": Documented(
        {
            "module": REQUIRED,
            "transformer_layer_cls": None,
            "num_microbatches": 1,
            "output_loss_value_spec": None,
            "return_mb_loss": False,
            "broadcast_and_average_loss": False,
            "pipeline_cuts": None,
            "input_names": None,
            "leaf_module_cls": None,
            "autowrap_functions": None,
            "autowrap_modules": None,
            "tracer_cls": None,
            "param_init_fn": None,
            "trace_file_path": None,
            "use_zero1_optimizer": False,
            "auto_partition": False,
        },
        STAGES,
        ours={"module": None},  # with `stages` there is none
    ),
    "pipeline.NxDPPModel.run_train": Documented(VOID, STAGES, "**"),
    "pipeline.NxDPPModel.run_eval": Documented(VOID, STAGES, "**"),
    "pipeline.NxDPPModel.local_named_parameters": Documented(VOID, STAGES),
    "pipeline.NxDPPModel.local_named_modules": Documented(VOID, STAGES),
    "optimizer.NeuronZero1Optimizer": Documented(
        {
            "params": REQUIRED,
            "optimizer_class": REQUIRED,
            "optimizer_dtype": None,
            "grad_clipping": True,
            "max_norm": None,
            "pin_layout": True,
            "sharding_groups": None,
            "grad_norm_groups": None,
            "lazy_init": False,
            "bucket_cap_mb_all_gather": 0,
            "bucket_cap_mb_reduce_scatter": 0,
            "use_grad_acc_hook": False,
            "save_master_weights": False,
            "higher_cc_precision": False,
        },
        f"{OPTIM}/zero",
        "**",
    ),
    "optimizer.NeuronZero1Optimizer.save_sharded_state_dict": Documented(
        {"output_dir": REQUIRED, "save_serially": True}, f"{OPTIM}/zero"
    ),
    "optimizer.NeuronZero1Optimizer.load_sharded_state_dict": Documented(
        {"output_dir": REQUIRED, "num_workers_per_step": 8}, f"{OPTIM}/zero"
    ),
    "trainer.neuronx_distributed_config": Documented(
        {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "pipeline_config": None,
            "optimizer_config": None,
            "activation_checkpoint_config": None,
            "pad_model": False,
            "sequence_parallel": False,
            "model_init_config": None,
            "lora_config": None,
        },
        f"{API}/test_config.py",
    ),
    "trainer.initialize_parallel_model": Documented(
        {"nxd_config": REQUIRED, "model_fn": REQUIRED}, f"{API}/test_build.py", "* **"
    ),
    "trainer.initialize_parallel_optimizer": Documented(
        {"nxd_config": REQUIRED, "optimizer_class": REQUIRED, "parameters": REQUIRED}, f"{API}/test_optimizer.py", "**"
    ),
    **{
        f"trainer.model.NxDModel.{name}": Documented(VOID, f"{API}/test_model.py", "* **")
        for name in ("run_train", "run_eval", "forward")
    },
    **{
        f"trainer.model.NxDModel.{name}": Documented(VOID, f"{API}/test_model.py")
        for name in (
            "local_module",
            "named_parameters",
            "parameters",
            "named_buffers",
            "buffers",
            "named_modules",
            "modules",
            "named_children",
            "children",
        )
    },
    "trainer.save_checkpoint": Documented(
        {
            "path": REQUIRED,
            "tag": "",
            "model": None,
            "optimizer": None,
            "scheduler": None,
            "user_content": None,
            "num_workers": 8,
            "use_xser": False,
            "num_kept_ckpts": None,
            "async_save": False,
            "zero1_optimizer": False,
        },
        f"{API}/test_checkpoint_values.py",
    ),
    "trainer.load_checkpoint": Documented(
        {
            "path": REQUIRED,
            "tag": None,
            "model": None,
            "optimizer": None,
            "scheduler": None,
            "num_workers": 8,
            "strict": True,
        },
        f"{API}/test_checkpoint_values.py",
    ),
    "modules.qkv_linear.GQAQKVColumnParallelLinear": Documented(
        {
            "input_size": REQUIRED,
            "output_sizes": REQUIRED,
            "bias": True,
            "gather_output": True,
            **LINEAR,
            "kv_size_multiplier": 1,
            "fuse_qkv": True,
        },
        f"{LAYERS}/test_qkv_linear.py",
        ours={"output_sizes": None},
    ),
    "modules.lora.LoRAModel": Documented({"module": REQUIRED, "config": REQUIRED}, LORA),
    "modules.lora.LoraConfig": Documented(
        {
            "enable_lora": True,
            "lora_rank": 16,
            "lora_alpha": 8,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": None,
            "use_rslora": False,
            "init_lora_weights": "default",
            "save_lora_base": False,
            "merge_lora": False,
            "save_lora_config_adapter": True,
            "load_lora_from_ckpt": False,
            "lora_save_dir": None,
            "lora_load_tag": None,
        },
        LORA,
        by_name=True,
    ),
    "trace.parallel_model_trace": Documented(
        {
            "func": REQUIRED,
            "example_inputs": REQUIRED,
            "compiler_workdir": None,
            "compiler_args": None,
            "inline_weights_to_neff": True,
            "bucket_config": None,
            "tp_degree": 1,
            "max_parallel_compilations": None,
        },
        f"{TRACE}/test_trace.py",
        ours={"example_inputs": None},  # `inputs`, as the older guide calls it, is taken as well
    ),
    "trace.parallel_model_save": Documented({"model": REQUIRED, "save_dir": REQUIRED}, f"{TRACE}/test_save_load.py"),
    "trace.parallel_model_load": Documented({"load_dir": REQUIRED}, f"{TRACE}/test_save_load.py"),
    "lightning.NeuronLTModule": Documented(
        {
            "model_fn": REQUIRED,
            "nxd_config": REQUIRED,
            "opt_cls": REQUIRED,
            "scheduler_cls": REQUIRED,
            "model_args": (),
            "model_kwargs": {},
            "opt_args": (),
            "opt_kwargs": {},
            "scheduler_args": (),
            "scheduler_kwargs": {},
            "grad_accum_steps": 1,
            "log_rank0": False,
            "manual_opt": True,
        },
        LIGHTNING,
        ours={
            "opt_cls": None,
            "scheduler_cls": None,
            "model_kwargs": None,
            "opt_kwargs": None,
            "scheduler_kwargs": None,
        },
    ),
    "lightning.NeuronXLAStrategy": Documented(
        {"nxd_config": None, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "save_load_xser": True}, LIGHTNING
    ),
    "lightning.NeuronXLAPrecisionPlugin": Documented(VOID, LIGHTNING),
    "lightning.NeuronTQDMProgressBar": Documented(VOID, LIGHTNING),
    "lightning.NeuronTensorBoardLogger": Documented({"save_dir": REQUIRED}, LIGHTNING),
}
OPTIONAL = {"lightning": "nxd_lightning", "trace": "neuronx_distributed.trace"}


def find(path: str):
    """What a documented path leads to; the test is skipped where the package that has it is not installed."""
    needed = OPTIONAL.get(path.partition(".")[0])
    if needed is not None:
        pytest.importorskip(needed)
    found = nxd
    for name in path.split("."):
        found = getattr(found, name)
    return found


def parameters_of(path: str) -> list[inspect.Parameter]:
    return [it for it in inspect.signature(find(path)).parameters.values() if it.name != "self"]


@pytest.mark.parametrize("path", [path for path, it in DOCUMENTED.items() if it.arguments])
def test_documented_arguments_come_first_in_order_with_their_defaults(path):
    documented = DOCUMENTED[path]
    kind = inspect.Parameter.KEYWORD_ONLY if documented.by_name else inspect.Parameter.POSITIONAL_OR_KEYWORD
    ours = [(it.name, it.default) for it in parameters_of(path) if it.kind is kind]

    expected = documented.arguments | (documented.ours or {})

    assert ours[: len(expected)] == list(expected.items())


@pytest.mark.parametrize("path", [path for path, it in DOCUMENTED.items() if it.variadic])
def test_documented_variadic_arguments_are_taken(path):
    kinds = {"*": inspect.Parameter.VAR_POSITIONAL, "**": inspect.Parameter.VAR_KEYWORD}

    assert {kinds[kind] for kind in DOCUMENTED[path].variadic.split()} <= {it.kind for it in parameters_of(path)}


@pytest.mark.parametrize("path", [path for path, it in DOCUMENTED.items() if not it.arguments and not it.variadic])
def test_what_is_documented_without_arguments_needs_none(path):
    needed = [it.name for it in parameters_of(path) if it.default is REQUIRED and it.kind is it.POSITIONAL_OR_KEYWORD]

    assert callable(find(path))
    assert needed == []


def test_load_takes_its_second_argument_by_its_older_name():
    with pytest.raises(CheckpointError, match="loading from nowhere failed"):
        nxd.parallel_layers.load("nowhere", model=torch.nn.Linear(1, 1))


def test_model_and_optimizer_wrappers_are_what_the_documents_say():
    assert issubclass(nxd.trainer.model.NxDModel, torch.nn.Module)
    assert issubclass(nxd.trainer.NxDOptimizer, torch.optim.Optimizer)
    assert isinstance(nxd.trainer.NxDOptimizer.grad_norm, property)


@pytest.mark.parametrize(
    "name",
    [
        "neuronx_distributed_config",
        "initialize_parallel_model",
        "initialize_parallel_optimizer",
        "save_checkpoint",
        "load_checkpoint",
    ],
)
def test_top_level_name_is_the_trainers(name):
    assert getattr(nxd, name) is getattr(nxd.trainer, name)
    assert name in dir(nxd)


def table() -> list[str]:
    """Return the rows that the reference must have."""
    return [TABLE_BEGINS, "|---|---|---|", *(row(path, it) for path, it in DOCUMENTED.items())]


def row(path: str, documented: Documented) -> str:
    arguments = [
        f"`{name}`" if default is REQUIRED else f"`{name}={shown(default)}`"
        for name, default in documented.arguments.items()
    ]
    arguments += [f"`{kind}`" for kind in documented.variadic.split()]
    for name, default in (documented.ours or {}).items():
        arguments.append(f"(ours: `{name}={shown(default)}`)")
    return f"| `{path}` | {', '.join(arguments)} | {documented.tested_in} |"


def shown(default: Any) -> str:
    return f"init.{default.__name__}" if callable(default) else repr(default)


def test_reference_has_the_table_of_all_that_is_listed_here():
    if not REFERENCE.exists():
        pytest.skip("not in the repository")
    lines = REFERENCE.read_text().splitlines()
    begin = lines.index(TABLE_BEGINS)

    shown_there = list(itertools.takewhile(lambda line: line.startswith("|"), lines[begin:]))

    assert shown_there == table()


@pytest.mark.parametrize("place", sorted({it.tested_in for it in DOCUMENTED.values()}))
def test_tests_that_the_table_names_are_there(place):
    if not (ROOT / "packages").is_dir():
        pytest.skip("not in the repository")
    assert (ROOT / place).exists()
