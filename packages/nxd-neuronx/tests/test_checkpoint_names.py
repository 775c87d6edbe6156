"""Checkpoint commands that scripts import: the converter, and ZeRO-1 states."""

import json
import subprocess
import sys

import pytest
import torch
from neuronx_distributed.optimizer import convert_zero_checkpoints
from neuronx_distributed.scripts.checkpoint_converter import CheckpointConverterBase
from neuronx_distributed.scripts.yaml_converter import convert_yaml_to_json
from neuronx_distributed.trainer.checkpoint import save_checkpoint
from nxd_ckpt.cli import main as nxd_ckpt
from nxd_ckpt.interop import open_hugging_face, read_whole
from nxd_engine.checkpoints.legacy_heads import HeadOrder

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 16, 8, 2, 12, 4
HEAD = HIDDEN // HEADS


def weights():
    torch.manual_seed(0)
    state = {"model.embed_tokens.weight": torch.randn(12, HIDDEN), "lm_head.weight": torch.randn(12, HIDDEN)}
    state["model.norm.weight"] = torch.randn(HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            state[f"{prefix}self_attn.{name}_proj.weight"] = torch.randn(rows * HEAD, HIDDEN)
        state[f"{prefix}self_attn.o_proj.weight"] = torch.randn(HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            state[f"{prefix}mlp.{name}_proj.weight"] = torch.randn(INNER, HIDDEN)
        state[f"{prefix}mlp.down_proj.weight"] = torch.randn(HIDDEN, INNER)
        state[f"{prefix}input_layernorm.weight"] = torch.randn(HIDDEN)
    return state


@pytest.fixture
def converted(tmp_path):
    """`converted(input, output, *options)`: runs the command."""
    (tmp_path / "config.json").write_text(
        json.dumps({"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "hidden_size": HIDDEN})
    )
    torch.save(weights(), tmp_path / "whole.pt")

    def run(source, target, *options):
        converter = CheckpointConverterBase()
        given = ["--input_dir", str(tmp_path / source), "--output_dir", str(tmp_path / target)]
        fixed = ["--hw_backend", "trn1", "--config", str(tmp_path / "config.json")]
        converter.run(converter.get_arg_parser().parse_args([*given, *fixed, *options]))
        return tmp_path / target

    return run


LAYOUTS = {
    "plain": ("--tp_size", "2"),
    "stages": ("--tp_size", "2", "--pp_size", "2"),
    "virtual stages": ("--pp_size", "2", "--virtual_pp_size", "2"),
    "repeated heads": ("--tp_size", "4", "--qkv_linear", "True", "--kv_size_multiplier", "2"),
    "blocked heads": ("--tp_size", "4", "--qkv_linear", "1", "--kv_size_multiplier", "2", "--hw_backend", "trn2"),
    "fused": ("--tp_size", "4", "--qkv_linear", "True", "--kv_size_multiplier", "2", "--fuse_qkv", "True"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("xser", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_weights_go_to_ranks_and_back_unchanged(converted, layout, xser):
    options = LAYOUTS[layout]

    ranks = converted("whole.pt", "ranks", "--convert_from_full_state", "--save_xser", str(xser), *options)
    whole = converted("ranks/model", "back", "--convert_to_full_state", "--load_xser", str(xser), *options)

    found, expected = torch.load(whole / "checkpoint.pt"), weights()
    assert len(list((ranks / "model").glob("dp_rank_00_tp_rank_*_pp_rank_*.pt"))) > 0
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def to_hugging_face(source, target):
    return nxd_ckpt(
        ["convert", str(source), str(target), "--from", "neuronx", "--to", "hf", "--tag", "t", "--sharding", "llama"]
    )


def test_ranks_become_a_hugging_face_llama_on_the_command_line(converted, tmp_path, capsys):
    converted("whole.pt", "old/t", "--convert_from_full_state", "--tp_size", "2")

    code = to_hugging_face(tmp_path / "old", tmp_path / "hf")

    assert (code, capsys.readouterr().err) == (0, "")
    found, expected = open_hugging_face(tmp_path / "hf"), weights()
    assert found.tensors.keys() == expected.keys()
    assert all(torch.equal(read_whole(found, name), expected[name]) for name in expected)


@pytest.mark.parametrize("layout", ["repeated heads", "blocked heads", "fused"])
def test_ranks_with_fused_heads_are_told_the_converter(converted, tmp_path, capsys, layout):
    converted("whole.pt", "old/t", "--convert_from_full_state", *LAYOUTS[layout])

    code = to_hugging_face(tmp_path / "old", tmp_path / "hf")

    assert code == 2
    assert "CheckpointConverterBase" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_converter_run_as_a_module_says_which_lines_to_write_and_these_work(tmp_path):
    torch.save(weights(), tmp_path / "whole.pt")
    (tmp_path / "llama.json").write_text(json.dumps({"num_attention_heads": HEADS, "hidden_size": HEADS * HEAD}))
    options = ["--input_dir", "whole.pt", "--output_dir", "ranks/t", "--hw_backend", "trn1", "--config", "llama.json"]

    def python(*arguments):
        command = [sys.executable, *arguments, *options, "--convert_from_full_state"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    told = python("-m", "neuronx_distributed.scripts.checkpoint_converter")
    assert (told.returncode, told.stdout) == (2, "")
    (tmp_path / "converter.py").write_text(told.stderr[told.stderr.index("from neuronx_distributed") :])
    run = python("converter.py")

    assert run.returncode == 0, run.stderr
    assert (tmp_path / "ranks" / "t" / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt").exists()


class Layers(torch.nn.Module):
    """With the names and shapes of some tensors, of which it fuses some as a script's model does."""

    def __init__(self, state):
        super().__init__()
        for name, value in state.items():
            parent = self
            *path, last = name.split(".")
            for part in path:
                if part not in dict(parent.named_children()):
                    parent.add_module(part, torch.nn.Module())
                parent = parent.get_submodule(part)
            parent.register_parameter(last, torch.nn.Parameter(value.clone()))


def fused(state):
    """Of each layer `qkv_proj.weight` and `gate_up_proj.weight`, the parts one after the other."""
    result = dict(state)
    for layer in range(LAYERS):
        for target, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            module = target.partition(".")[0]
            names = [f"model.layers.{layer}.{module}.{part}_proj.weight" for part in parts]
            result[f"model.layers.{layer}.{target}.weight"] = torch.cat([result.pop(name) for name in names])
    return result


@pytest.mark.parametrize("folder", ["runs/step_1/model", "runs/step_1"])
def test_checkpoint_of_the_training_script_becomes_whole_weights(converted, tmp_path, folder):
    save_checkpoint(tmp_path / "runs", "step_1", Layers(fused(weights())))

    whole = converted(folder, "back", "--convert_to_full_state", "--load_xser", "True", "--tp_size", "2")

    found, expected = torch.load(whole / "checkpoint.pt"), weights()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_checkpoint_of_other_sizes_than_its_config_says_is_refused(converted, tmp_path):
    state = fused(weights())
    state["model.layers.0.self_attn.qkv_proj.weight"] = torch.zeros(30, HIDDEN)
    save_checkpoint(tmp_path / "runs", "step_1", Layers(state))

    with pytest.raises(ValueError, match=r"qkv_proj.weight \[30, 16\] needs \[16, 4, 4\] rows according to --config"):
        converted("runs/step_1/model", "back", "--convert_to_full_state")


def test_ranks_hold_repeated_heads_with_their_queries(converted):
    ranks = converted("whole.pt", "ranks", "--convert_from_full_state", *LAYOUTS["repeated heads"])
    whole, own = weights(), torch.load(ranks / "model" / "dp_rank_00_tp_rank_02_pp_rank_00.pt")

    fused = [name for name in own if name.endswith("gate_up_proj.weight")]
    assert fused == [f"model.layers.{layer}.mlp.gate_up_proj.weight" for layer in range(LAYERS)]  # in the given order
    heads = whole["model.layers.0.self_attn.q_proj.weight"].view(HEADS, HEAD, HIDDEN)
    keys = whole["model.layers.0.self_attn.k_proj.weight"].view(KV_HEADS, HEAD, HIDDEN)
    # Copies are K0 K1 K0 K1: rank 2 has the second copy of K0, and of its queries 0..3 the second half.
    assert torch.equal(own["model.layers.0.self_attn.qkv_proj.weight_k"], keys[0])
    assert torch.equal(own["model.layers.0.self_attn.qkv_proj.weight_q"], heads[2:4].flatten(0, 1))


def test_heads_are_ordered_as_the_hardware_has_them():
    interleaved, blocked = (HeadOrder(8, 2, 2, 4, blocked=it) for it in (False, True))

    assert [interleaved.kv_heads_of(rank) for rank in range(4)] == [[0], [1], [0], [1]]
    assert [interleaved.heads_of(rank) for rank in range(4)] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert [blocked.kv_heads_of(rank) for rank in range(4)] == [[0], [0], [1], [1]]
    assert [blocked.heads_of(rank) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("heads", "advice"),
    [
        ((8, 2, 1, 4), "use --qkv_linear True --kv_size_multiplier 2"),
        ((12, 6, 1, 4), "use --qkv_linear True --kv_size_multiplier 2"),
        ((6, 2, 1, 4), "use another --tp_size, no multiplier fits"),
    ],
)
def test_heads_that_do_not_divide_are_told_the_multiplier_that_fits(heads, advice):
    with pytest.raises(ValueError, match=advice):
        HeadOrder(*heads, blocked=False)


def test_files_of_ranks_are_rewritten_with_a_file_for_each_tensor(converted):
    converted("whole.pt", "ranks", "--convert_from_full_state", "--tp_size", "2")

    xser = converted("ranks/model", "xser", "--convert_to_xser")
    back = converted("xser/model", "plain", "--convert_from_xser")

    name = "dp_rank_00_tp_rank_01_pp_rank_00.pt"
    first, last = (torch.load(folder / "model" / name) for folder in (back.parent / "ranks", back))
    assert (xser / "model" / f"{name}.tensors").is_dir()
    assert all(torch.equal(first[key], last[key]) for key in first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "pass exactly one of --convert_from_full_state"),
        (("--convert_from_full_state", "--ep_size", "2"), "--ep_size above 1: not supported"),
        (("--convert_from_full_state", "--tp_size", "8"), "does not divide|must be a multiple of"),
        (("--convert_to_full_state",), "is not a folder"),
    ],
)
def test_options_that_do_not_fit_are_refused(converted, options, message):
    with pytest.raises(ValueError, match=message):
        converted("whole.pt", "ranks", *options)


def test_a_training_config_becomes_a_models_config(tmp_path):
    text = "model: {num_layers: 4, num_attention_heads: 8, hidden_size: 16, num_kv_heads: 2}"
    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "other.yaml").write_text("model: {hidden_size: 16}")

    target = convert_yaml_to_json(str(tmp_path / "run.yaml"), str(tmp_path / "config.json"))

    found = json.loads((tmp_path / "config.json").read_text())
    assert target == str(tmp_path / "config.json")
    assert found == {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 16, "num_key_value_heads": 2}
    with pytest.raises(ValueError, match=r"lacks model.num_layers"):
        convert_yaml_to_json(str(tmp_path / "other.yaml"))
    (tmp_path / "nested.yaml").write_text(text.replace("num_layers: 4", "num_layers: [4]"))
    with pytest.raises(ValueError, match=r"has a list as the model's num_hidden_layers; expected a number"):
        convert_yaml_to_json(str(tmp_path / "nested.yaml"))


# States of ZeRO-1.


def test_zero1_states_go_to_another_number_of_replicas_and_back(tmp_path):
    momentum = torch.arange(10.0).view(5, 2)
    (tmp_path / "two" / "optim").mkdir(parents=True)
    padded = torch.cat([momentum, torch.zeros(1, 2)]).chunk(2)
    for replica in range(2):
        state = {
            "base_state": {0: {"step": torch.tensor(3.0), "exp_avg": padded[replica].clone()}},
            "shape_info": {0: [5, 2]},
        }
        torch.save(state, tmp_path / "two" / "optim" / f"dp_rank_{replica:02d}_tp_rank_00_pp_rank_00.pt")

    def run(source, target, *options):
        convert_zero_checkpoints.main(
            ["--input_dir", str(tmp_path / source), "--output_dir", str(tmp_path / target), *options]
        )
        return tmp_path / target / "optim"

    whole = torch.load(run("two", "whole", "--convert_to_full") / "full_tp_rank_00_pp_rank_00.pt")
    three = run("two", "three", "--convert_to_sharded", "--dp_size", "3")
    again = run("whole", "again", "--convert_to_sharded", "--dp_size", "2")

    last = torch.load(again / "dp_rank_01_tp_rank_00_pp_rank_00.pt")["base_state"][0]
    assert torch.equal(whole["base_state"][0]["exp_avg"], momentum)
    assert {file.name for file in three.iterdir()} == {f"dp_rank_0{it}_tp_rank_00_pp_rank_00.pt" for it in range(3)}
    assert torch.equal(last["exp_avg"], padded[1])
    assert last["step"] == 3
    with pytest.raises(ValueError, match="already holds whole states"):
        run("whole", "twice", "--convert_to_full")
