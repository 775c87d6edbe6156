"""The layouts are written here by hand, with plain torch.save, as NeuronX Distributed does."""

import pickle
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from nxd_ckpt import CheckpointError, open_checkpoint, save
from nxd_ckpt.interop import from_checkpoint, open_neuronx, read_whole, save_source, write_neuronx
from nxd_ckpt.interop.neuronx import LLAMA, Piece, Pieces, Split, complete_tags, read_user_content

TP, PP = 2, 2
SHARDING = {"embed.weight": Split(0), "column.weight": Split(0), "row.weight": Split(1), "gate_up": Split(0, stride=2)}
WHOLE = {
    "embed.weight": torch.randn(8, 6),
    "column.weight": torch.randn(8, 6).to(torch.bfloat16),
    "row.weight": torch.randn(6, 8),
    "gate_up": torch.randn(8, 6),
    "norm.weight": torch.randn(6),
}
STAGES = {"embed.weight": 0, "column.weight": 0, "norm.weight": 0, "row.weight": 1, "gate_up": 1}


def local_state(tp_rank: int, pp_rank: int) -> dict[str, torch.Tensor]:
    gate, up = WHOLE["gate_up"].chunk(2)
    local = {
        "embed.weight": WHOLE["embed.weight"].chunk(TP)[tp_rank],
        "column.weight": WHOLE["column.weight"].chunk(TP)[tp_rank],
        "row.weight": WHOLE["row.weight"].chunk(TP, dim=1)[tp_rank],
        "gate_up": torch.cat([gate.chunk(TP)[tp_rank], up.chunk(TP)[tp_rank]]),
        "norm.weight": WHOLE["norm.weight"],
    }
    return {name: tensor.clone() for name, tensor in local.items() if STAGES[name] == pp_rank}


@pytest.fixture
def torch_xla(monkeypatch):
    """torch-xla's class under its name, as far as pickles need it."""
    names = ["torch_xla", "torch_xla.utils", "torch_xla.utils.serialization"]
    modules = {name: types.ModuleType(name) for name in names}

    class TensorReference:
        __slots__ = ["tid"]

        def __init__(self, tid):
            self.tid = tid

    TensorReference.__module__, TensorReference.__qualname__ = names[2], "TensorReference"
    modules[names[2]].TensorReference = TensorReference
    modules[names[0]].utils, modules[names[1]].serialization = modules[names[1]], modules[names[2]]
    with monkeypatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield TensorReference


def save_rank(path: Path, content: dict, reference=None, *, wrap=False, with_info=True, expert="") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if reference is None:
        torch.save({"model": content} if wrap else content, path)
        return
    folder = Path(f"{path}.tensors")
    folder.mkdir()
    for number, tensor in enumerate(content.values()):
        torch.save(tensor, folder / f"tensor_{number}.pt")
    skeleton = {name: reference(number) for number, name in enumerate(content)}
    torch.save({"model": skeleton} if wrap else skeleton, path)
    if with_info:
        info = {
            i: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "expert_model_parallel": name == expert,
            }  # the last one of newer releases
            for i, (name, tensor) in enumerate(content.items())
        }
        torch.save(info, f"{path}.info.pt")


def write_v2(root: Path, tag: str = "step_5", reference=None, *, infix: str = "", with_info=True) -> Path:
    folder = root / tag
    folder.mkdir(parents=True)
    (folder / "checkpoint").write_text("1")
    for pp in range(PP):
        for tp in range(TP):
            file = folder / "model" / f"dp_rank_00{infix}_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"
            save_rank(file, local_state(tp, pp), reference, with_info=with_info)
    torch.save({"last_epoch": 3, "_last_lr": [1e-3]}, folder / "scheduler.pt")
    torch.save({"total_steps": 5}, folder / "user_content.pt")
    (folder / "done").write_text("1")
    return folder


@pytest.mark.parametrize(("lost", "is_read"), [("router", True), ("expert", False)])
def test_only_what_all_expert_ranks_have_alike_is_read_from_the_first_of_them(tmp_path, torch_xla, lost, is_read):
    folder = tmp_path / "step_5"
    for ep in range(2):
        content = {"router": torch.full((2,), 7.0), "expert": torch.full((1, 2), float(ep))}
        file = folder / "model" / f"dp_rank_00_ep_rank_0{ep}_tp_rank_00_pp_rank_00.pt"
        save_rank(file, content, torch_xla, expert="expert")
    (Path(f"{file}.tensors") / f"tensor_{int(lost == 'expert')}.pt").unlink()
    for marker in ("checkpoint", "done"):
        (folder / marker).write_text("1")

    def read():
        return read_whole(open_neuronx(tmp_path, "step_5", sharding={"expert": Split(None, expert_dim=0)}), "expert")

    if is_read:
        assert read().tolist() == [[0, 0], [1, 1]]
    else:
        with pytest.raises(CheckpointError, match=r"ep_rank_01.*tensor_1\.pt"):
            read()


def assert_whole(source) -> None:
    assert set(source.tensors) == set(WHOLE)
    for name, expected in WHOLE.items():
        assert torch.equal(read_whole(source, name), expected), name


def test_v2_is_read_whole(tmp_path):
    write_v2(tmp_path)

    source = open_neuronx(tmp_path, "step_5", sharding=SHARDING, trust_user_content=True)

    assert_whole(source)
    assert source.objects == {
        "scheduler": {"last_epoch": 3, "_last_lr": [1e-3]},
        "user_content": {"total_steps": 5},
    }


@pytest.mark.parametrize("with_info", [True, False])
def test_v2_xser_is_read_without_torch_xla(tmp_path, torch_xla, monkeypatch, with_info):
    write_v2(tmp_path, reference=torch_xla, with_info=with_info)
    with monkeypatch.context() as patch:  # undone before the fixture takes its modules away
        for name in [name for name in sys.modules if name.startswith("torch_xla")]:
            patch.delitem(sys.modules, name)

        assert_whole(open_neuronx(tmp_path, sharding=SHARDING))


def test_the_tags_own_folder_and_expert_ranks_are_understood(tmp_path):
    folder = write_v2(tmp_path, infix="_ep_rank_00")

    assert_whole(open_neuronx(folder, sharding=SHARDING))


@pytest.mark.parametrize("xser", [False, True])
@pytest.mark.parametrize("name", ["tp_rank_{tp:02d}_pp_rank_{pp:02d}", "tp_rank_{tp}_pp_rank_{pp}"])
def test_v1_is_read_whole_in_both_spellings(tmp_path, torch_xla, xser, name):
    for tp in range(TP):
        for pp in range(PP):
            path = tmp_path / name.format(tp=tp, pp=pp)
            save_rank(
                path if xser else path / "checkpoint.pt",
                local_state(tp, pp),
                torch_xla if xser else None,
                wrap=True,
                with_info=False,
            )

    assert_whole(open_neuronx(tmp_path, sharding=SHARDING))


def test_v1_without_pipeline_in_its_names_is_read(tmp_path):
    for tp in range(TP):
        save_rank(tmp_path / f"tp_rank_{tp}" / "checkpoint.pt", local_state(tp, 0))

    source = open_neuronx(tmp_path, sharding=SHARDING)

    assert torch.equal(read_whole(source, "embed.weight"), WHOLE["embed.weight"])


def test_v2_becomes_a_checkpoint_that_loads_bit_by_bit(tmp_path):
    write_v2(tmp_path / "theirs")

    source = open_neuronx(tmp_path / "theirs", sharding=SHARDING, trust_user_content=True)
    save_source(source, tmp_path / "ours", "imported", step=5)

    checkpoint = open_checkpoint(tmp_path / "ours")
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in WHOLE.items())
    assert checkpoint.objects["user_content"] == {"total_steps": 5}


def test_experts_are_put_together_over_their_ranks(tmp_path):
    experts = torch.randn(4, 6, 8)
    (tmp_path / "a" / "model").mkdir(parents=True)
    for ep in range(2):
        for tp in range(2):
            local = experts.chunk(2)[ep].chunk(2, dim=2)[tp].clone()
            torch.save({"w": local}, tmp_path / "a" / "model" / f"dp_rank_00_ep_rank_0{ep}_tp_rank_0{tp}_pp_rank_00.pt")
    for marker in ("checkpoint", "done"):
        (tmp_path / "a" / marker).write_text("1")

    source = open_neuronx(tmp_path, "a", sharding={"w": Split(2, expert_dim=0)})

    assert torch.equal(read_whole(source, "w"), experts)


def test_padding_of_a_vocabulary_is_cut_off(tmp_path):
    vocabulary = torch.randn(5, 2)
    padded = torch.cat([vocabulary, torch.zeros(3, 2)])
    for tp in range(4):
        save_rank(tmp_path / f"tp_rank_0{tp}_pp_rank_00" / "checkpoint.pt", {"w": padded.chunk(4)[tp].clone()})

    source = open_neuronx(tmp_path, sharding={"w": Split(0, global_size=5)})

    assert torch.equal(read_whole(source, "w"), vocabulary)


FUSED = Pieces(
    local_shape=(6, 3),
    global_shapes={"q": (8, 3), "k": (2, 3)},
    by_tp_rank=[[Piece("q", (0, 0), (4, 3), (4 * rank, 0)), Piece("k", (4, 0), (2, 3), (0, 0))] for rank in range(2)],
)


def test_fused_weights_with_repeated_heads_come_apart_and_together(tmp_path):
    q, k = torch.randn(8, 3), torch.randn(2, 3)
    for tp in range(2):
        save_rank(
            tmp_path / "theirs" / f"tp_rank_0{tp}_pp_rank_00" / "checkpoint.pt",
            {"qkv": torch.cat([q.chunk(2)[tp], k])},
            wrap=True,
        )

    source = open_neuronx(tmp_path / "theirs", sharding={"qkv": FUSED})
    write_neuronx(source, tmp_path / "again", sharding={"qkv": FUSED}, tensor_parallel_size=2, layout="v1")

    assert torch.equal(read_whole(source, "q"), q)
    assert torch.equal(read_whole(source, "k"), k)
    for tp in range(2):
        written = torch.load(tmp_path / "again" / f"tp_rank_0{tp}_pp_rank_00" / "checkpoint.pt", weights_only=True)
        assert torch.equal(written["model"]["qkv"], torch.cat([q.chunk(2)[tp], k]))


# --- optimizer states ---


def adam_state(tensors: list[torch.Tensor]) -> dict:
    state = {i: {"step": torch.tensor(7.0), "exp_avg": t * 2, "exp_avg_sq": t * t} for i, t in enumerate(tensors)}
    return {"state": state, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [*range(len(tensors))]}]}


def test_optimizer_states_are_split_as_their_parameters(tmp_path):
    folder = write_v2(tmp_path)
    names = {pp: [name for name, stage in STAGES.items() if stage == pp] for pp in range(PP)}
    for pp in range(PP):
        for tp in range(TP):
            local = local_state(tp, pp)
            file = folder / "optim" / f"dp_rank_00_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"
            save_rank(file, adam_state([local[name] for name in names[pp]]))

    source = open_neuronx(tmp_path, sharding=SHARDING, parameter_names=names)

    for name, whole in WHOLE.items():
        assert torch.equal(read_whole(source, f"optimizer/{name}/exp_avg"), whole * 2)
        assert read_whole(source, f"optimizer/{name}/step") == 7
    assert source.objects["optimizer"] == {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]}


@pytest.mark.parametrize("reference", [False, True])
def test_zero1_states_are_put_together_over_data_parallel_ranks(tmp_path, torch_xla, reference):
    whole = {"w": torch.randn(10, 4), "b": torch.randn(3)}  # neither a rank's 5 rows nor 3 divide by 2: both are padded
    folder = tmp_path / "a"
    for tp in range(2):
        local = {"w": whole["w"].chunk(2)[tp].clone(), "b": whole["b"]}
        save_rank(folder / "model" / f"dp_rank_00_tp_rank_0{tp}_pp_rank_00.pt", local)
        for dp in range(2):
            shards = []
            for tensor in local.values():
                rows = -(-tensor.shape[0] // 2)
                padded = torch.cat([tensor, tensor.new_full((2 * rows - len(tensor), *tensor.shape[1:]), torch.nan)])
                shards.append(padded[dp * rows : (dp + 1) * rows].clone())
            state = {
                "state": {},
                "param_groups": [{"lr": 0.1, "params": [0, 1]}],
                "base_state": {i: {"step": torch.tensor(3.0), "exp_avg": shard * 2} for i, shard in enumerate(shards)},
                "shape_info": {i: tensor.shape for i, tensor in enumerate(local.values())},
                "sharded_master_weights": dict(enumerate(shards)),
            }
            save_rank(folder / "optim" / f"dp_rank_0{dp}_tp_rank_0{tp}_pp_rank_00.pt", state)
    for marker in ("checkpoint", "done"):
        (folder / marker).write_text("1")

    source = open_neuronx(tmp_path, "a", sharding={"w": Split(0)}, parameter_names=["w", "b"])
    save_source(source, tmp_path / "ours", "a")

    checkpoint = open_checkpoint(tmp_path / "ours")
    for name, tensor in whole.items():
        assert torch.equal(checkpoint.read(f"optimizer/{name}/exp_avg"), tensor * 2)
        assert torch.equal(checkpoint.read(f"optimizer/{name}/master_weight"), tensor)
        assert checkpoint.read(f"optimizer/{name}/step") == 3


@pytest.mark.parametrize("pp", [1, 2])
def test_zero1_states_in_a_torch_distributed_checkpoint_are_read_by_their_names(tmp_path, pp):
    whole, folder, state = {f"layers.{i}.w": torch.randn(6, 4) for i in range(2)}, tmp_path / "a", {}
    for tp in range(2):
        for stage in range(pp):
            names = list(whole)[stage::pp] if pp > 1 else list(whole)
            local = {name: whole[name].chunk(2)[tp].clone() for name in names}
            save_rank(folder / "model" / f"dp_rank_00_tp_rank_0{tp}_pp_rank_0{stage}.pt", local)
            suffix = (f"|pp-000{stage}" if pp > 1 else "") + f"|tp-000{tp}"
            for name, tensor in local.items():
                state.setdefault(name, {"step": torch.tensor(3.0)})[f"exp_avg{suffix}"] = tensor * 2
    groups = [{"lr": 0.1, "params": [0, 1]}]
    dcp.save({"base_state": state, "param_groups": groups}, checkpoint_id=folder / "optim", no_dist=True)
    for marker in ("checkpoint", "done"):
        (folder / marker).write_text("1")

    source = open_neuronx(tmp_path, "a", sharding={"*.w": Split(0)})

    for name, tensor in whole.items():
        assert torch.equal(read_whole(source, f"optimizer/{name}/exp_avg"), tensor * 2)
        assert read_whole(source, f"optimizer/{name}/step") == 3
    assert source.objects["optimizer"] == {"param_groups": [{"lr": 0.1}]}


@pytest.mark.parametrize(
    ("names", "message"),
    [(["w"], "parameter 1, but parameter_names has 1"), (["b", "w"], "optimizer's order"), (["w", "x"], "lacks it")],
)
def test_wrong_parameter_names_are_refused(tmp_path, names, message):
    folder = tmp_path / "a"
    local = {"w": torch.randn(4, 2), "b": torch.randn(3)}
    save_rank(folder / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt", local)
    save_rank(folder / "optim" / "dp_rank_00_tp_rank_00_pp_rank_00.pt", adam_state(list(local.values())))
    for marker in ("checkpoint", "done"):
        (folder / marker).write_text("1")

    with pytest.raises(CheckpointError, match=message):
        open_neuronx(tmp_path, "a", sharding={}, parameter_names=names)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"base_state": {0: {"exp_avg": torch.eye(2).to_sparse()}}}, "'exp_avg' of 'w' .* torch.sparse_coo"),
        ({"state": {0: {"exp_avg": torch.ones(2, 2, dtype=torch.complex32)}}}, "'exp_avg' of 'w' .*complex32"),
        ({"state": {}, "param_groups": 3}, "param_groups in the optimizer of .* is a int, expected a list"),
        ({"base_state": [1]}, "not a dict of dicts"),
        ([1], "is a list, expected a dict"),
    ],
)
def test_an_optimizer_state_that_is_none_is_refused(tmp_path, state, message):
    folder = tmp_path / "a"
    save_rank(folder / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt", {"w": torch.ones(2, 2)})
    save_rank(folder / "optim" / "dp_rank_00_tp_rank_00_pp_rank_00.pt", state)
    for marker in ("checkpoint", "done"):
        (folder / marker).write_text("1")

    with pytest.raises(CheckpointError, match=message):
        open_neuronx(tmp_path, "a", sharding={}, parameter_names=["w"])


# --- what is refused ---


@pytest.mark.parametrize("marker", ["done", "checkpoint"])
def test_a_checkpoint_without_its_markers_is_not_complete(tmp_path, marker):
    (write_v2(tmp_path) / marker).unlink()

    assert complete_tags(tmp_path) == []
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        open_neuronx(tmp_path, "step_5", sharding=SHARDING)
    with pytest.raises(CheckpointError, match="holds 0 complete checkpoints"):
        open_neuronx(tmp_path, sharding=SHARDING)


def test_one_of_several_tags_must_be_named(tmp_path):
    write_v2(tmp_path, "a")
    write_v2(tmp_path, "b")

    assert complete_tags(tmp_path) == ["a", "b"]
    with pytest.raises(CheckpointError, match=r"2 complete checkpoints \(a, b\)"):
        open_neuronx(tmp_path, sharding=SHARDING)


def test_a_missing_rank_is_named(tmp_path):
    (write_v2(tmp_path) / "model" / "dp_rank_00_tp_rank_01_pp_rank_00.pt").unlink()

    with pytest.raises(CheckpointError, match="no file of pp rank 0, ep rank 0, tp rank 1, dp rank 0"):
        open_neuronx(tmp_path, sharding=SHARDING)


def test_a_name_that_claims_a_million_ranks_is_refused_at_once(tmp_path):
    save_rank(tmp_path / "tp_rank_999999999_pp_rank_999999999" / "checkpoint.pt", {"w": torch.ones(1)})

    with pytest.raises(CheckpointError, match="no file of pp rank 0"):
        open_neuronx(tmp_path, sharding={})


@pytest.mark.parametrize("arguments", [{"dim": "0"}, {"dim": -1}, {"dim": 0, "stride": 0}, {"dim": 0, "stride": None}])
def test_a_split_of_no_numbers_is_refused(arguments):
    with pytest.raises(ValueError, match="of a Split is not an integer"):
        Split(**arguments)


def test_a_sparse_tensor_is_refused_by_name(tmp_path):
    save_rank(tmp_path / "tp_rank_00_pp_rank_00" / "checkpoint.pt", {"w": torch.eye(2).to_sparse()})

    with pytest.raises(CheckpointError, match=r"'w' is torch.float32, torch.sparse_coo"):
        open_neuronx(tmp_path, sharding={})


def test_a_split_that_was_not_declared_is_an_error_and_not_rank_zeros_values(tmp_path):
    write_v2(tmp_path)

    source = open_neuronx(tmp_path, sharding={**SHARDING, "embed.weight": Split(None)})

    with pytest.raises(
        CheckpointError,
        match=r"'embed.weight' \[0:4,0:6\] differs between .* tp rank 0.* tp rank 1.*CheckpointConverterBase",
    ):
        read_whole(source, "embed.weight")


@pytest.mark.parametrize("rule", [Split(2), Split(0, stride=3), Split(0, global_size=9)])
def test_a_sharding_that_does_not_fit_is_refused(tmp_path, rule):
    write_v2(tmp_path)

    with pytest.raises(ValueError, match=r"embed.weight"):
        open_neuronx(tmp_path, sharding={**SHARDING, "embed.weight": rule})


def test_info_that_contradicts_a_tensor_is_an_error(tmp_path, torch_xla):
    folder = write_v2(tmp_path, reference=torch_xla)
    torch.save(torch.randn(2), folder / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors" / "tensor_0.pt")

    with pytest.raises(CheckpointError, match=r"tensor_0.pt holds .*\[2\].*, but .*info.pt says"):
        open_neuronx(tmp_path, sharding=SHARDING)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "file",
    [
        "model/dp_rank_00_tp_rank_00_pp_rank_00.pt",
        "model/dp_rank_00_tp_rank_00_pp_rank_00.pt.info.pt",
        "model/dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors/tensor_0.pt",
        "optim/dp_rank_00_tp_rank_00_pp_rank_00.pt",
        "scheduler.pt",
    ],
)
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, torch_xla, bomb, exploded, file, legacy):
    folder = write_v2(tmp_path, reference=torch_xla)
    (folder / "optim").mkdir()
    torch.save({"model": bomb}, folder / file, _use_new_zipfile_serialization=not legacy)

    with pytest.raises(CheckpointError, match=r"asks for posix.system, which could run code, and is refused"):
        open_neuronx(tmp_path, sharding=SHARDING, parameter_names=["x"])

    assert not exploded()


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04junk"])
def test_a_file_that_is_no_torch_file_is_refused(tmp_path, content):
    (write_v2(tmp_path) / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt").write_bytes(content)

    with pytest.raises(CheckpointError, match=r"dp_rank_00_tp_rank_00_pp_rank_00.pt"):
        open_neuronx(tmp_path, sharding=SHARDING)


def test_a_plain_malicious_pickle_is_refused_and_not_run(tmp_path, bomb, exploded):
    path = write_v2(tmp_path) / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    path.write_bytes(pickle.dumps(bomb, protocol=2))

    with pytest.raises(CheckpointError, match="refused"):
        open_neuronx(tmp_path, sharding=SHARDING)

    assert not exploded()


def test_user_content_of_plain_values_is_read(tmp_path):
    write_v2(tmp_path)

    source = open_neuronx(tmp_path, sharding=SHARDING)

    assert source.objects["user_content"] == {"total_steps": 5}
    assert read_user_content(tmp_path, "step_5") == {"total_steps": 5}


def test_user_content_that_would_run_code_needs_trust(tmp_path, bomb, exploded):
    torch.save(bomb, write_v2(tmp_path) / "user_content.pt")

    with pytest.raises(CheckpointError, match=r"user_content.pt.*pass trust=True"):
        read_user_content(tmp_path, "step_5")
    with pytest.warns(UserWarning, match=r"leaving out user_content.pt: .*--trust-user-content"):
        source = open_neuronx(tmp_path, sharding=SHARDING)

    assert "user_content" not in source.objects
    assert not exploded()
    read_user_content(tmp_path, "step_5", trust=True)
    assert exploded()


@pytest.mark.parametrize("tag", ["../escaped", "a/b", "/etc", "", ".."])
def test_a_tag_that_leaves_the_folder_is_refused(tmp_path, tag):
    write_v2(tmp_path / "theirs")
    source = open_neuronx(tmp_path / "theirs", "step_5", sharding=SHARDING)

    with pytest.raises(ValueError, match="is not allowed"):
        write_neuronx(source, tmp_path / "new", tag, sharding=SHARDING, tensor_parallel_size=1)
    with pytest.raises(ValueError, match="is not allowed"):
        open_neuronx(tmp_path / "theirs", tag, sharding=SHARDING)
    with pytest.raises(ValueError, match="is not allowed"):
        read_user_content(tmp_path / "theirs", tag)

    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize("pickled", [b"]" * 9000 + b"a" * 8999, b"]q\x00h\x00a"], ids=["deep", "in itself"])
def test_containers_without_end_are_refused(tmp_path, pickled):
    path = tmp_path / "tp_rank_00_pp_rank_00" / "checkpoint.pt"
    save_rank(path, {"w": torch.ones(1)})
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, b"\x80\x02" + pickled + b"." if name.endswith("data.pkl") else content)

    with pytest.raises(CheckpointError, match=r"checkpoint.pt holds containers that are nested more than 64 deep"):
        open_neuronx(tmp_path, sharding={})


def deflated(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def laughs() -> list:
    value: list = ["ha"]
    for _ in range(40):
        value = [value] * 10
    return value


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            lambda: torch.zeros(1).expand(1 << 40),
            r"tensor \[1099511627776\] of 4398046511104 bytes in 4 bytes of memory",
        ),
        (lambda: torch.zeros(1).as_strided((1 << 20, 1 << 20), (0, 0)), "save a contiguous one"),
        (lambda: torch.zeros(1 << 20).as_strided((1 << 20, 1 << 20), (0, 1)), "save a contiguous one"),
        (lambda: [torch.zeros(1).expand(1 << 22)] * 50, "share the same memory"),
        (lambda: dict(enumerate([torch.zeros(1 << 20)] * 2000)), "share the same memory"),
        (laughs, "by repeating the same ones"),
    ],
)
def test_a_file_that_claims_more_than_its_bytes_is_refused(tmp_path, content, message, legacy):
    path = write_v2(tmp_path) / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    torch.save({"w": content()}, path, _use_new_zipfile_serialization=not legacy)

    with pytest.raises(CheckpointError, match=message):
        open_neuronx(tmp_path, sharding=SHARDING)


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path):
    path = write_v2(tmp_path) / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    torch.save({"w": torch.zeros(1 << 20)}, path)
    deflated(path)

    with pytest.raises(CheckpointError, match=r"would unpack to \d+: torch.save compresses nothing"):
        open_neuronx(tmp_path, sharding=SHARDING)


def test_tied_tensors_and_small_repeated_ones_are_read(tmp_path):
    tied = torch.randn(4, 4)
    save_rank(
        tmp_path / "tp_rank_00_pp_rank_00" / "checkpoint.pt",
        {"head": tied, "embedding": tied, "row": torch.ones(1).expand(1000)},
    )

    source = open_neuronx(tmp_path, sharding={})
    found = {name: read_whole(source, name) for name in source.tensors}

    torch.testing.assert_close(found, {"head": tied, "embedding": tied, "row": torch.ones(1000)})


def test_absent_user_content_is_none(tmp_path):
    (write_v2(tmp_path) / "user_content.pt").unlink()

    assert read_user_content(tmp_path, "step_5") is None


# --- writing ---


@pytest.mark.parametrize("xser", [False, True])
@pytest.mark.parametrize("layout", ["v1", "v2"])
def test_what_is_written_is_the_librarys_layout_and_comes_back(tmp_path, torch_xla, layout, xser):
    save(tmp_path / "ours", "a", WHOLE)
    tag = "step_5" if layout == "v2" else None

    write_neuronx(
        from_checkpoint(open_checkpoint(tmp_path / "ours")),
        tmp_path / "theirs",
        tag,
        sharding=SHARDING,
        tensor_parallel_size=TP,
        pipeline_stage_of=STAGES.__getitem__,
        layout=layout,
        xser=xser,
        user_content={"n": 1} if layout == "v2" else None,
    )

    assert_whole(open_neuronx(tmp_path / "theirs", tag, sharding=SHARDING))
    folder = tmp_path / "theirs" / (tag or "")
    names = {"v1": "tp_rank_{tp:02d}_pp_rank_{pp:02d}", "v2": "model/dp_rank_00_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"}
    for tp in range(TP):
        for pp in range(PP):
            path = folder / names[layout].format(tp=tp, pp=pp)
            content = torch.load(path / "checkpoint.pt" if layout == "v1" and not xser else path, weights_only=False)
            content = content["model"] if layout == "v1" else content
            if xser:  # torch-xla's own class was found under its name
                assert {type(reference) for reference in content.values()} == {torch_xla}
                files = {n: Path(f"{path}.tensors") / f"tensor_{r.tid}.pt" for n, r in content.items()}
                content = {name: torch.load(file, weights_only=True) for name, file in files.items()}
            expected = local_state(tp, pp)
            assert set(content) == set(expected)
            assert all(torch.equal(content[name], tensor) for name, tensor in expected.items())
            if xser and layout == "v2":
                info = torch.load(f"{path}.info.pt", weights_only=True)
                assert sorted(i["shape"] for i in info.values()) == sorted(t.shape for t in expected.values())
    if layout == "v2":
        assert [(folder / marker).read_text() for marker in ("checkpoint", "done")] == ["1", "1"]
        assert torch.load(folder / "user_content.pt") == {"n": 1}


def test_every_dtype_goes_out_and_in_bit_by_bit(tmp_path, every_dtype, bits):
    save(tmp_path / "ours", "a", every_dtype)

    write_neuronx(
        from_checkpoint(open_checkpoint(tmp_path / "ours")),
        tmp_path / "theirs",
        "a",
        sharding={},
        tensor_parallel_size=1,
    )

    source = open_neuronx(tmp_path / "theirs", sharding={})
    assert {n: bits(read_whole(source, n)) for n in source.tensors} == {n: bits(t) for n, t in every_dtype.items()}


def test_a_checkpoint_that_is_there_is_never_overwritten(tmp_path):
    write_v2(tmp_path)
    source = open_neuronx(tmp_path, sharding=SHARDING)

    with pytest.raises(ValueError, match="not empty"):
        write_neuronx(source, tmp_path, "step_5", sharding=SHARDING, tensor_parallel_size=2)


def test_a_degree_that_does_not_divide_is_refused_before_anything_is_written(tmp_path):
    write_v2(tmp_path)
    source = open_neuronx(tmp_path, sharding=SHARDING)

    with pytest.raises(ValueError, match="3 ranks or chunks do not divide dimension 0"):
        write_neuronx(source, tmp_path / "new", "a", sharding=SHARDING, tensor_parallel_size=3)

    assert not (tmp_path / "new").exists()


def test_the_llama_rules_split_a_llama(tmp_path):
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    names += [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkvo"]
    names += [f"model.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")]
    save(tmp_path / "ours", "a", {name: torch.randn(4, 4) for name in names})

    write_neuronx(
        from_checkpoint(open_checkpoint(tmp_path / "ours")), tmp_path / "x", "a", sharding=LLAMA, tensor_parallel_size=2
    )

    written = torch.load(tmp_path / "x" / "a" / "model" / "dp_rank_00_tp_rank_01_pp_rank_00.pt")
    by_shape = {name: tuple(tensor.shape) for name, tensor in written.items()}
    assert {name for name, shape in by_shape.items() if shape == (4, 2)} == {names[6], names[-1]}
    assert {name for name, shape in by_shape.items() if shape == (4, 4)} == {"model.norm.weight"}
