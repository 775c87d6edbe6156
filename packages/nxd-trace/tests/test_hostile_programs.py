"""Traced models from a stranger: none runs code, reads outside its folder or is loaded; each is a one-line error.

Every folder here has a manifest that fits its files, hashes included: whoever writes the files writes the manifest.
"""

import copy
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
from pathlib import Path

import nxd_trace
import pytest
import torch
import traced_models as models
from nxd_trace.compilers import COMPILERS
from nxd_trace.manifest import ModelManifest
from safetensors.torch import load_file, save_file

X = torch.ones(2, models.IN, dtype=torch.float64)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model with two ranks and compiler "export", which the tests copy."""
    folder = tmp_path_factory.mktemp("hostile") / "model"
    settings = {"tp_degree": 2, "compiler": "export", "inline_weights_to_neff": False, "progress": False}
    with nxd_trace.parallel_model_trace(models.mlp, X, weights=models.logical_weights(), **settings) as model:
        nxd_trace.parallel_model_save(model, folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path, monkeypatch):
    """A copy to forge; code from it would write to the working directory, which is empty."""
    shutil.copytree(saved, tmp_path / "model")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "model"
    assert sorted(os.listdir(tmp_path)) == ["here", "model"]
    assert os.listdir(tmp_path / "here") == []


class RunsCode:
    """Pickles to code that creates a file."""

    def __reduce__(self):
        return os.system, ("touch ran",)


CODE = "__import__('os').system('touch ran')"


def sign(folder: Path, **changes: object) -> None:
    """Rewrite the manifest with these values, for the current files."""
    manifest = json.loads((folder / "manifest.json").read_text())
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    manifest["files"] = {
        str(path.relative_to(folder)): {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in files
    }
    (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def program_of(folder: Path) -> Path:
    (program,) = folder.glob("programs/*")
    return program


def assert_is_refused(folder: Path, text: str = "") -> None:
    with pytest.raises(nxd_trace.ModelFolderError, match=text or None) as raised:
        nxd_trace.parallel_model_load(folder, trust_code=False)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000


LINEAR = ["aten.linear.default", [{"value": 4}, {"value": 0}, {"value": 1}], {}]


def calls(name: str, *args: object, **kwargs: object) -> list[object]:
    """Return a graph whose first call is this one."""
    inputs, others = [["input"]] * 5, [["aten.relu.default", [{"value": 5}], {}]]
    return {"nodes": [*inputs, [name, list(args), kwargs], *others], "outputs": [{"value": 6}]}


def argument(value: object) -> object:
    """Return a graph with this argument."""
    return calls("aten.add.Tensor", {"value": 4}, value)


def nested(depth: int) -> object:
    value: object = {"value": 0}
    for _ in range(depth):
        value = [value]
    return value


def graphs(depth: int) -> object:
    value: object = {"nodes": [], "outputs": None}
    for _ in range(depth):
        value = {"nodes": [["higher_order.cond", [{"graph": value}, 0, 0, 0], {}]], "outputs": None}
    return value


NO_OPERATOR = "is not an operator that a program may call"
NO_VALUE = "is not a value that a program can hold"

GRAPHS = {
    "a function of Python": (calls("os.system", "touch ran"), NO_OPERATOR),
    "a function behind torch": (calls("torch.os.system", "touch ran"), NO_OPERATOR),
    "a builtin": (calls("builtins.eval", CODE), NO_OPERATOR),
    "a function that finds attributes": (calls("operator.attrgetter", "__class__"), NO_OPERATOR),
    "a function that calls methods": (calls("operator.methodcaller", "__class__"), NO_OPERATOR),
    "an operator that writes a file": (calls("aten.save.default", {"value": 4}, "ran"), NO_OPERATOR),
    "an operator that makes a file": (calls("aten.from_file.default", "ran", True, 8), NO_OPERATOR),
    "an operator with an output that makes a file": (calls("aten.from_file.out", "ran", True, 8), NO_OPERATOR),
    "an operator that trusts its arguments": (calls("aten._sparse_csr_tensor_unsafe.default"), NO_OPERATOR),
    "an operator of another namespace": (calls("quantized.linear_unpack.default", {"value": 4}), NO_OPERATOR),
    "an operator of torch's tests": (calls("_test._crash_if_aten.default"), NO_OPERATOR),
    "a control flow that is not listed": (calls("higher_order.print", "{}", 1), NO_OPERATOR),
    "an attribute of an operator": (calls("aten.linear.__class__"), NO_OPERATOR),
    "an attribute of a namespace": (calls("aten.__class__.default"), NO_OPERATOR),
    "an operator of no overload": (calls("aten.linear"), NO_OPERATOR),
    "a path behind an operator": (calls("aten.linear.default.__call__"), NO_OPERATOR),
    "code as an operator": (calls(CODE), NO_OPERATOR),
    "code as a keyword": (calls("aten.relu.default", {"value": 4}, **{f"x={CODE}, y": 1}), "has no argument"),
    "a keyword that the operator lacks": (calls("aten.relu.default", {"value": 4}, out=1), "has no argument"),
    "a keyword of Python": (calls("aten.uniform.default", {"value": 4}, **{"from": 0.0}), "cannot write this graph"),
    "a keyword of a function": (calls("operator.add", 1, 2, x=1), "has no argument 'x'"),
    "too few arguments of a function": (calls("operator.add"), "operator.add: missing a required argument"),
    "torch's expression": (argument({"as_expr": {"expr_str": CODE}}), NO_VALUE),
    "torch's custom object": (argument({"as_custom_obj": {"name": "x", "class_fqn": "os.system"}}), NO_VALUE),
    "a value of a later node": (argument({"value": 6}), NO_VALUE),
    "a value before the first": (argument({"value": -1}), NO_VALUE),
    "a value by name": (argument({"value": "0"}), NO_VALUE),
    "a value with more to it": (argument({"value": 0, "dtype": "float32"}), NO_VALUE),
    "a dtype that is a module": (argument({"dtype": "os"}), NO_VALUE),
    "a dtype that is a function": (argument({"dtype": "load"}), NO_VALUE),
    "a layout that is a dtype": (argument({"layout": "float32"}), NO_VALUE),
    "a device that is code": (argument({"device": f"cpu' + {CODE} + '"}), NO_VALUE),
    "a device of someone's own": (argument({"device": "privateuseone:0"}), NO_VALUE),
    "lists in lists": (argument(nested(100)), NO_VALUE),
    "graphs in graphs": (graphs(120), "nested too deeply|takes 0 tensors"),
    "a bad operator in an inner graph": (
        calls("higher_order.cond", True, {"graph": calls("os.system", "touch ran")}, None, []),
        NO_OPERATOR,
    ),
    "a node that is a text": ({"nodes": [CODE], "outputs": None}, "is not a node"),
    "a node without arguments": ({"nodes": [["aten.relu.default"]], "outputs": None}, "is not a node"),
    "arguments that are no list": ({"nodes": [["aten.relu.default", "x", {}]], "outputs": None}, "is not a node"),
    "a graph without outputs": ({"nodes": []}, "is not a graph"),
    "a graph with more to it": ({"nodes": [], "outputs": None, "guards_code": [CODE]}, "is not a graph"),
    "a graph that is a list": ([], "is not a graph"),
    "too few inputs": ({"nodes": [["input"]], "outputs": []}, "takes 1 tensors; expected 0 constants and 4 more|and 5"),
    "too many inputs": ({"nodes": [["input"]] * 9, "outputs": []}, "takes 9 tensors"),
}


@pytest.mark.sample(11)
@pytest.mark.parametrize(("graph", "text"), GRAPHS.values(), ids=GRAPHS)
def test_program_with_invalid_contents_is_refused(folder, graph, text):
    (program_of(folder) / "program.json").write_text(json.dumps(graph))
    sign(folder)

    assert_is_refused(folder, text)


BYTES = {
    "nothing": b"",
    "half a graph": b'{"nodes": [["input"], ["aten.re',
    "a pickle": pickle.dumps(RunsCode()),
    "no UTF-8": b"\xff\xfe{",
    "brackets without end": b"[" * 200_000,
    "graphs without end": b'{"nodes": [["higher_order.cond", [{"graph": ' * 20_000,
    "a number of many digits": b'{"nodes": [], "outputs": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("name", ["program.json", "constants.safetensors"])
@pytest.mark.parametrize("content", BYTES.values(), ids=BYTES)
def test_program_file_that_is_something_else_is_refused(folder, name, content):
    (program_of(folder) / name).write_bytes(content)
    sign(folder)

    assert_is_refused(folder)


def test_program_in_torchs_own_format_is_never_opened(folder):
    (program_of(folder) / "program.json").unlink()
    torch.save(RunsCode(), program_of(folder) / "program.pt2")
    sign(folder)

    assert_is_refused(folder, r"program\.json")


def test_text_in_a_program_is_never_read_as_code(folder):
    text = f"' + {CODE} + '"
    (program_of(folder) / "program.json").write_text(json.dumps(argument([text, {"value": 0}])))
    sign(folder)

    with nxd_trace.parallel_model_load(folder) as model, pytest.raises(nxd_trace.WorkerError, match="aten::add"):
        model(X)


def signature(**changes: object) -> dict[str, object]:
    """Return the program's graph with a change."""
    spec = {"shape": [2, 6], "dtype": "float64"}
    return {
        "name": "main",
        "inputs": [spec],
        "input_structure": {"list": [{"tuple": [0]}, {"dict": {}}]},
        "outputs": [{"shape": [2, 4], "dtype": "float64"}],
        "output_structure": 0,
        **changes,
    }


def programs(**changes: object) -> dict[str, object]:
    return {"programs": [signature(**changes)]}


MANIFESTS = {
    "more ranks than memory": {"tp_degree": 10**12},
    "ranks that are no number": {"tp_degree": True},
    "a format beyond numbers": {"format": float("inf")},
    "no programs but a text": {"programs": "main"},
    "two programs of one name": {"programs": [signature(), signature()]},
    "a name that is a list": programs(name=["main"]),
    "a shape beyond memory": programs(inputs=[{"shape": [10**9, 10**9], "dtype": "float64"}]),
    "a shape of texts": programs(inputs=[{"shape": "26", "dtype": "float64"}]),
    "a dtype that is a function": programs(inputs=[{"shape": [2, 6], "dtype": "load"}]),
    "a dtype that is a list": programs(inputs=[{"shape": [2, 6], "dtype": ["float64"]}]),
    "an output out of nowhere": programs(output_structure={"tuple": [0, 1]}),
    "an output that is code": programs(output_structure=CODE),
    "an output of two kinds": programs(output_structure={"tuple": [0], "list": []}),
    "inputs without keywords": programs(input_structure={"list": [{"tuple": [0]}]}),
    "inputs that are no call": programs(input_structure=0),
    "bucket functions of another kind": {"buckets": {"kernel": "pickled", "preprocessor": "built-in"}},
    "bucket functions that are a list": {"buckets": ["scripted"]},
    "files that are a list": {"files": ["manifest.json"]},
    "a file elsewhere": {"files": {"../here": {"size": 0, "sha256": ""}}},
    "a file at the root": {"files": {"/etc/passwd": {"size": 0, "sha256": ""}}},
    "a file of two lines": {"files": {"a\nb": {"size": 0, "sha256": ""}}},
    "a file with more to it": {"files": {"a": {"size": 0, "sha256": "", "run": CODE}}},
    "a version of two lines": {"torch": "2.0\nall is well"},
    "a system that is a list": {"system": ["Linux"]},
    "a key that is not known": {"run": CODE},
    "a compiler that is a module": {"compiler": "os"},
}


@pytest.mark.parametrize("changes", MANIFESTS.values(), ids=MANIFESTS)
def test_manifest_with_values_of_another_kind_is_refused(folder, changes):
    sign(folder, **changes)

    assert_is_refused(folder)


@pytest.mark.parametrize("name", ["manifest.json", "tp_rank_00/rank.json", "tp_rank_00/weights.safetensors"])
@pytest.mark.parametrize("content", BYTES.values(), ids=BYTES)
def test_file_of_a_model_that_is_something_else_is_refused(folder, name, content):
    (folder / name).write_bytes(content)
    if name != "manifest.json":
        sign(folder)

    assert_is_refused(folder)


def up_weight(**changes: object) -> dict[str, object]:
    whole = {"shape": [4, 6], "dtype": "float64", "pieces": None, "required": True}
    return {"up.weight": {**whole, **changes}}


RANKS = {
    "a program elsewhere": ("programs", {"folder": "../../elsewhere"}),
    "a program whose folder is a list": ("programs", {"folder": ["programs"]}),
    "a program of unknown weights": ("programs", {"weights": ["up.weight", CODE]}),
    "a program of too many states": ("programs", {"states": ["up.weight"], "state_shapes": [[4, 6]]}),
    "shapes without states": ("programs", {"state_shapes": [[1]]}),
    "a weight of another dtype": ("weights", up_weight(dtype="float32")),
    "a weight whose dtype is a module": ("weights", up_weight(dtype="os")),
    "a weight of another shape": ("weights", up_weight(shape=[6, 4])),
    "a weight of a negative shape": ("weights", up_weight(shape=[-1, 6])),
    "a weight of odd pieces": ("weights", up_weight(pieces=[{"name": "up.weight", "shape": "46"}])),
    "a weight that no file holds": ("weights", {"more": up_weight()["up.weight"]}),
    "a state that no file holds": ("states", {"rows": {"shape": [4, 8], "dtype": "float64", "zeros": False}}),
    "a state beyond memory": ("states", {"rows": {"shape": [10**9, 10**9], "dtype": "float64", "zeros": True}}),
    "a state whose dtype is a function": ("states", {"rows": {"shape": [4, 8], "dtype": "load", "zeros": True}}),
}


@pytest.mark.parametrize(("section", "changes"), RANKS.values(), ids=RANKS)
def test_rank_with_values_of_another_kind_is_refused(folder, section, changes):
    path = folder / "tp_rank_00" / "rank.json"
    rank = json.loads(path.read_text())
    (rank["programs"][0] if section == "programs" else rank[section]).update(changes)
    path.write_text(json.dumps(rank))
    sign(folder)

    assert_is_refused(folder, "rank.json|weights.safetensors|state.safetensors|program")


@pytest.mark.parametrize("compiler", [name for name, compiler in COMPILERS.items() if compiler.is_code])
def test_programs_that_are_code_are_refused_where_code_is_not_trusted(folder, compiler):
    for name in ("program.pt2", "program.pt"):
        torch.save(RunsCode(), program_of(folder) / name)
    sign(folder, compiler=compiler, compiler_version=COMPILERS[compiler].version())

    assert_is_refused(folder, f"the programs, of compiler '{compiler}', in .* are code")


def test_scripted_bucket_functions_are_refused_where_code_is_not_trusted(folder):
    (folder / "bucket_kernel.pt").write_bytes(pickle.dumps(RunsCode()))
    sign(folder, buckets={"kernel": "scripted", "preprocessor": "built-in"})

    assert_is_refused(folder, "the scripted bucket functions in .* are code")


def test_program_of_compiler_export_is_loaded_where_code_is_not_trusted(folder):
    with nxd_trace.parallel_model_load(folder, trust_code=False) as model:
        torch.testing.assert_close(model(X), models.plain_mlp(models.logical_weights(), X))


NASTY = (
    None,
    True,
    -1,
    0,
    1,
    2**63,
    10**30,
    1e308,
    float("nan"),
    "",
    "0",
    "..",
    "/",
    "\n\0",
    CODE,
    [],
    [[]],
    {},
    {"": []},
)


def values_of(tree: object) -> list[tuple[dict | list, object]]:
    """Yield every value of nested JSON as its container and key."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in items for place in [(tree, key), *values_of(value)]]


def mutate(path: Path, chance: random.Random) -> None:
    """Change some values of a JSON file, or some bytes of any file."""
    if path.suffix == ".json" and chance.random() < 0.7:
        tree = json.loads(path.read_text())
        for _ in range(chance.randint(1, 3)):
            places = values_of(tree)
            if not places:
                break
            (holder, key), (other, from_key) = chance.choice(places), chance.choice(places)
            holder[key] = copy.deepcopy(chance.choice([*NASTY, other[from_key], other[from_key]]))
        path.write_text(json.dumps(tree))
        return
    content = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 8)):
        start = chance.randrange(len(content) + 1)
        length = chance.choice([0, 1, 1, 2, 8, 64])
        content[start : start + chance.choice([0, length])] = chance.choice(
            [chance.randbytes(length), b"[" * length, b"9" * length, bytes(length), b"\xff" * length]
        )
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_changed_model_is_whole_or_refused_and_takes_no_memory(folder, tmp_path, seed):
    chance = random.Random(seed)
    shutil.copytree(folder, tmp_path / "model" / "good")
    good, changed = tmp_path / "model" / "good", tmp_path / "model" / "changed"
    names = sorted(str(path.relative_to(good)) for path in good.rglob("*") if path.is_file())
    refused = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for _ in range(500):
        shutil.copytree(good, changed)
        name = chance.choice([*names, *[name for name in names if name.endswith("program.json")] * 3])
        mutate(changed / name, chance)
        if name != "manifest.json":
            sign(changed)
        try:
            ModelManifest.read(changed).check(changed)
        except nxd_trace.ModelFolderError:
            refused += 1
        shutil.rmtree(changed)

    assert refused > 300
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # kilobytes


def test_new_weights_of_a_dtype_that_models_lack_are_refused(folder, tmp_path):
    header = json.dumps({"up.bias": {"dtype": "U16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (folder / "more.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))

    with (
        nxd_trace.parallel_model_load(folder) as model,
        pytest.raises(nxd_trace.ModelFolderError, match=r"holds 'up\.bias' of dtype U16; expected one of"),
    ):
        model.replace_weights(folder / "more.safetensors")


def test_long_file_that_was_changed_is_refused(folder):
    weights = folder / "tp_rank_01" / "weights.safetensors"
    save_file({**load_file(weights), "padding": torch.zeros(65 << 20, dtype=torch.uint8)}, weights)
    sign(folder)
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")

    assert_is_refused(folder, "tp_rank_01/weights.safetensors has been changed since it was saved")
