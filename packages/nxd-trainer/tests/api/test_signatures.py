"""The documents' signatures, written out by hand, against ours: every argument by name, in order, with its default."""

import inspect

import neuronx_distributed as nxd
import pytest
import torch

REQUIRED = inspect.Parameter.empty

FUNCTIONS = {
    "trainer.neuronx_distributed_config": {
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
    "trainer.initialize_parallel_model": {"nxd_config": REQUIRED, "model_fn": REQUIRED},
    "trainer.initialize_parallel_optimizer": {
        "nxd_config": REQUIRED,
        "optimizer_class": REQUIRED,
        "parameters": REQUIRED,
    },
    "pipeline.NxDPPModel": {
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
}
VARIADIC = {
    "trainer.initialize_parallel_model": {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD},
    "trainer.initialize_parallel_optimizer": {inspect.Parameter.VAR_KEYWORD},
    "trainer.model.NxDModel.run_train": {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD},
    "trainer.model.NxDModel.run_eval": {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD},
    "trainer.model.NxDModel.forward": {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD},
}
METHODS_OF_MODEL = [
    "local_module",
    "named_parameters",
    "parameters",
    "named_buffers",
    "buffers",
    "named_modules",
    "modules",
    "named_children",
    "children",
]


def find(path: str):
    found = nxd
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path", FUNCTIONS)
def test_documented_arguments_come_first_in_order_with_their_defaults(path):
    parameters = inspect.signature(find(path)).parameters.values()
    by_position = {it.name: it.default for it in parameters if it.kind is it.POSITIONAL_OR_KEYWORD}

    assert list(by_position.items())[: len(FUNCTIONS[path])] == list(FUNCTIONS[path].items())


@pytest.mark.parametrize("path", VARIADIC)
def test_documented_variadic_arguments_are_taken(path):
    kinds = {parameter.kind for parameter in inspect.signature(find(path)).parameters.values()}

    assert VARIADIC[path] <= kinds


def test_model_and_optimizer_wrappers_are_what_the_documents_say():
    assert issubclass(nxd.trainer.model.NxDModel, torch.nn.Module)
    assert issubclass(nxd.trainer.NxDOptimizer, torch.optim.Optimizer)
    assert all(callable(getattr(nxd.trainer.model.NxDModel, name)) for name in METHODS_OF_MODEL)
    assert isinstance(nxd.trainer.NxDOptimizer.grad_norm, property)


@pytest.mark.parametrize(
    "name", ["neuronx_distributed_config", "initialize_parallel_model", "initialize_parallel_optimizer"]
)
def test_top_level_name_is_the_trainers(name):
    assert getattr(nxd, name) is getattr(nxd.trainer, name)
    assert name in dir(nxd)
