"""Torch's private names that the packages use: the one list of them, and that the installed torch has each.

torch may change a private name in any release. `nox -s "torch(2.9)"` and its siblings run this with every supported
minor version, so a name that goes away is noticed here. A name counts as private if a part of it begins with one
underscore. Not counted are attributes of objects, such as a tensor's, and names in strings.
"""

import ast
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

PACKAGES = Path(__file__).parents[2] / "packages"
STAND_IN = "the stand-in for Neuron devices, for tests"

# What each is for; it stands for the names below it, too. Of a pair the second is the first version that has it.
KNOWN: dict[str, str | tuple[str, str]] = {
    # public in all but the name
    "torch.utils._pytree": "trees of tensors; a public twin came with torch 2.13",
    "torch.utils._python_dispatch": "counts operations and bytes",
    "torch._ops.OpOverload": "the type of an operation",
    "torch._inductor": "models compiled ahead of time, as torch's documentation shows",
    "torch.distributed._functional_collectives": "collectives in compiled graphs",
    "torch.distributed.algorithms._checkpoint": "the wrappers of NeuronX Distributed's activation checkpoints",
    "torch.optim._muon": "the iterations and learning rates of torch's Muon",
    "torch.nn.Module._load_from_state_dict": "says whether a module loads in its own way",
    # attention and other operations below public functions
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "attention of a block with its log-sum-exp",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "its gradients",
    "torch.ops.aten._scaled_dot_product_flash_attention": "the same on GPUs; activation checkpoints keep its output",
    "torch.ops.aten._scaled_dot_product_flash_attention_backward": "its gradients",
    "torch.ops.aten._scaled_dot_product_efficient_attention": "the same with masks, and in float32",
    "torch.ops.aten._scaled_dot_product_efficient_attention_backward": "its gradients",
    "torch.ops.aten._scaled_dot_product_cudnn_attention": "activation checkpoints keep its output",
    "torch.ops.aten._unsafe_view": "a view that autograd does not track as one",
    "torch.ops.aten._assert_tensor_metadata": "left out of exported programs",
    # recordings
    "torch._C.DisableTorchFunction": "records a program's tensors outside its function modes, such as InFloat64",
    # process groups
    "torch.distributed.distributed_c10d._world": "the groups of this process, by name and number",
    "torch.distributed.distributed_c10d._get_default_group": "the group of all ranks",
    "torch.distributed.distributed_c10d._get_default_store": "the store of all ranks",
    "torch.distributed.distributed_c10d._get_default_timeout": "the timeout of a backend",
    "torch.distributed.distributed_c10d._new_process_group_helper": "a group that its members alone make",
    "torch.distributed.distributed_c10d._process_group_name": "its name",
    "torch.distributed.distributed_c10d._resolve_process_group": STAND_IN,
    "torch.distributed.rendezvous._rendezvous_handlers": "test ranks meet without ports",
    # graphs and autograd
    "torch._C._DisableTorchDispatch": "transports compute outside of counting modes",
    "torch._C._len_torch_dispatch_stack": "whether there is such a mode",
    "torch._C._current_graph_task_id": "whether backward is running",
    "torch._C._autograd._unsafe_set_version_counter": "a backward that reads parameters that are given up fails",
    "torch._C._dispatch_get_all_op_names": "the operations that a graph file may name",
    "torch._C.DispatchKey": "registers the operations of shared memory, and the stand-in for Neuron devices",
    "torch._guards.TracingContext": "whether torch.compile is tracing",
    "torch._subclasses.fake_tensor.FakeTensorMode": "finds cuts of a pipeline without memory",
    "torch.autograd.Variable._execution_engine": "backward in float64 of a model in less",
    "torch._has_compatible_shallow_copy_type": "whether a parameter can take another's data",
    "torch._GLOBAL_DEVICE_CONTEXT": "torch 2.9 loses the default device between tests",
    # plans
    "torch.distributed._tools.fake_collectives": "collectives on the meta device, before torch 2.13",
    "torch.testing._internal.distributed.fake_pg": "many ranks in one process",
    # files and small helpers
    "torch.distributed.checkpoint.filesystem._StorageInfo": "torch's distributed checkpoints",
    "torch.serialization._get_layout": "torch's distributed checkpoints",
    "torch.nn.modules.module._IncompatibleKeys": "what load_state_dict returns",
    "torch.nn.modules.conv._ConvNd": "the type of convolutions",
    "torch.nn.modules.utils._pair": "arguments of convolutions",
    # the stand-in for Neuron devices
    "torch._C._acc": (STAND_IN, "2.13"),
    "torch._C._construct_storage_from_data_pointer": STAND_IN,
    "torch._C._ExcludeDispatchKeyGuard": STAND_IN,
    "torch._C._get_privateuse1_backend_name": STAND_IN,
    "torch._C.DispatchKeySet": STAND_IN,
    "torch._dynamo": STAND_IN,
    "torch._functorch.aot_autograd.make_boxed_func": STAND_IN,
    "torch._tensor_str._str": STAND_IN,
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend": (STAND_IN, "2.13"),
}


def names_in(source: str) -> set[str]:
    """The private names of torch in a file, each as long as it is written there."""
    tree = ast.parse(source)
    imported: dict[str, str] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                first = name.name.partition(".")[0]
                imported[name.asname or first] = name.name if name.asname else first
                found.add(name.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                imported[name.asname or name.name] = f"{node.module}.{name.name}"
                found.add(f"{node.module}.{name.name}")
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            found.add(dotted(node, imported))
    return {name for name in found if name.partition(".")[0] == "torch" and is_private(name)}


def dotted(node: ast.expr, imported: Mapping[str, str]) -> str:
    """The full name of a chain of attributes; empty if it does not begin with an imported name."""
    match node:
        case ast.Attribute(value=value, attr=attribute):
            begin = dotted(value, imported)
            return f"{begin}.{attribute}" if begin else ""
        case ast.Name(id=name):
            return imported.get(name, "")
    return ""


def is_private(name: str) -> bool:
    """Whether a part of a name begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def known(name: str) -> str | None:
    """The entry of `KNOWN` that a name belongs to."""
    return next((entry for entry in KNOWN if f"{name}.".startswith(f"{entry}.")), None)


def resolved(name: str) -> Any:
    """What a name stands for in the installed torch."""
    first, *rest = name.split(".")
    found, path = importlib.import_module(first), first
    for part in rest:
        path += f".{part}"
        if not hasattr(found, part):
            importlib.import_module(path)
        found = sys.modules.get(path) or getattr(found, part)  # torch.distributed.rendezvous is a function as well
    return found


def used() -> list[str]:
    """The private names that the packages use."""
    files = PACKAGES.glob("*/src/**/*.py")
    return sorted(set().union(*(names_in(path.read_text(encoding="utf-8")) for path in files)))


def test_every_private_name_is_in_the_list_and_nothing_else_is() -> None:
    entries = {name: known(name) for name in used()}

    assert [name for name, entry in entries.items() if entry is None] == []
    assert set(KNOWN) - set(entries.values()) == set(), "no longer used: take it out of the list"


@pytest.mark.parametrize("name", used())
def test_installed_torch_has_the_private_name(name: str) -> None:
    entry = KNOWN[known(name) or ""]
    if isinstance(entry, tuple) and version_of(torch.__version__) < version_of(entry[1]):
        pytest.skip(f"from torch {entry[1]} on")

    resolved(name)


def version_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C._acc.make()", {"torch._C._acc.make"}),
        ("import torch.distributed as dist\ndist._name", {"torch.distributed._name"}),
        (
            "from torch.utils import _pytree as tree\ntree.tree_map",
            {"torch.utils._pytree", "torch.utils._pytree.tree_map"},
        ),
        ("from torch.utils._pytree import tree_map", {"torch.utils._pytree.tree_map"}),
        ("import torch\ntorch.__version__; torch.ones(1)._base; self._torch", set()),
    ],
)
def test_private_name_is_found_as_it_is_written(source: str, found: set[str]) -> None:
    assert names_in(source) == found


def test_name_that_torch_does_not_have_is_noticed() -> None:
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        resolved("torch._C._no_such_name")
