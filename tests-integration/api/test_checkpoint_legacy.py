"""Checkpoints of NeuronX Distributed, written here with torch.save file by file, load through `load_checkpoint`."""

import itertools
import os
import pickle

import pytest
import torch
from nxd_ckpt import CheckpointError
from nxd_engine.checkpoints.find import has_checkpoint
from nxd_engine.checkpoints.load import load_checkpoint
from nxd_engine.checkpoints.optimizer_state import optimizer_state
from nxd_layers import ColumnParallelLinear, GQAQKVColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_optim import NeuronZero1Optimizer
from nxd_pipeline import NxDPPModel
from nxd_state import active_group, destroy_model_parallel, initialize_model_parallel
from torch import nn

SHAPES = {
    "embed.weight": (8, 4),
    "gate_up.weight": (16, 4),
    "gate_up.bias": (16,),
    "norm.weight": (16,),
    "down.weight": (4, 16),
}
DIMS = {"embed.weight": 0, "gate_up.weight": 0, "gate_up.bias": 0, "down.weight": 1}
DECAYED = ["embed.weight", "gate_up.weight", "down.weight"]
OTHERS = ["gate_up.bias", "norm.weight"]
GROUPS = [{"lr": 0.25, "betas": (0.9, 0.95), "weight_decay": 0.1}, {"lr": 0.25, "weight_decay": 0.0}]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = ParallelEmbedding(8, 4)
        self.gate_up = ColumnParallelLinear(4, 16, stride=2)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.zeros(16))
        self.down = RowParallelLinear(16, 4, bias=False)


def whole(name, key=""):
    """The whole tensor of a name, different for each name and kind of state."""
    generator = torch.Generator().manual_seed(sum(map(ord, name + key)))
    return torch.randn(SHAPES[name], generator=generator)


def part(name, tensor, tp_rank, tp_size):
    """What a tensor-parallel rank has of it; gate and up are two matrices in one."""
    if name not in DIMS:
        return tensor
    if name.startswith("gate_up"):
        return torch.cat([matrix.chunk(tp_size)[tp_rank] for matrix in tensor.chunk(2)])
    return tensor.chunk(tp_size, DIMS[name])[tp_rank].clone()


def model_of(tp_rank, tp_size):
    return {name: part(name, whole(name), tp_rank, tp_size) for name in SHAPES}


def optimizer_of(tp_rank, tp_size):
    """torch's own form: parameters by number, in the order of the groups."""
    state = {
        number: {
            "step": torch.tensor(5.0),
            **{key: part(name, whole(name, key), tp_rank, tp_size) for key in ("exp_avg", "exp_avg_sq")},
        }
        for number, name in enumerate(DECAYED + OTHERS)
    }
    return {"state": state, "param_groups": param_groups()}


def param_groups():
    return [{**GROUPS[0], "params": [0, 1, 2]}, {**GROUPS[1], "params": [3, 4]}]


def zero1_of(tp_rank, tp_size, dp_rank, dp_size):
    """torch-xla's form: rows of each rank's parameter, padded to a multiple of the replicas."""

    def rows(tensor):
        size = -(-tensor.shape[0] // dp_size)
        padded = torch.cat([tensor, tensor.new_zeros(size * dp_size - tensor.shape[0], *tensor.shape[1:])])
        return padded[dp_rank * size : (dp_rank + 1) * size].clone()

    plain = optimizer_of(tp_rank, tp_size)
    base = {
        number: {key: rows(value) if value.ndim else value for key, value in values.items()}
        for number, values in plain["state"].items()
    }
    return {"base_state": base, "state": {}, "shape_info": {}, "param_groups": param_groups()}


def save_xser(content, path):
    """The skeleton and a file for each tensor, as torch-xla's serialization leaves them."""
    from nxd_ckpt.interop.neuronx.rank_files import save_skeleton

    os.makedirs(path + ".tensors")
    with open(path, "wb") as file:
        tensors = save_skeleton(content, file)
    for number, tensor in tensors.items():
        torch.save(tensor, f"{path}.tensors/tensor_{number}.pt")


def write_v2(root, tag, tp_size, *, dp_size=None, xser=False, user_content=None):
    """A folder of `trainer.save_checkpoint`; `dp_size` is given with ZeRO-1."""
    folder = root / tag
    (folder / "model").mkdir(parents=True)
    (folder / "optim").mkdir()
    (folder / "checkpoint").write_text("1")
    write = save_xser if xser else torch.save
    for tp_rank in range(tp_size):
        write(model_of(tp_rank, tp_size), str(folder / f"model/dp_rank_00_tp_rank_{tp_rank:02d}_pp_rank_00.pt"))
        for dp_rank in range(dp_size or 1):
            state = zero1_of(tp_rank, tp_size, dp_rank, dp_size) if dp_size else optimizer_of(tp_rank, tp_size)
            write(state, str(folder / f"optim/dp_rank_{dp_rank:02d}_tp_rank_{tp_rank:02d}_pp_rank_00.pt"))
    torch.save({"last_epoch": 4, "_step_count": 5, "_last_lr": [0.25, 0.25]}, folder / "scheduler.pt")
    if user_content is not None:
        torch.save(user_content, folder / "user_content.pt")
    (folder / "done").write_text("1")


def write_v1(root, tp_size, *, xser=False):
    for tp_rank in range(tp_size):
        path = root / f"tp_rank_{tp_rank:02d}_pp_rank_00"
        content = {"model": model_of(tp_rank, tp_size), "optimizer": optimizer_of(tp_rank, tp_size)}
        if xser:
            save_xser(content, str(path))
        else:
            path.mkdir(parents=True)
            torch.save(content, path / "checkpoint.pt")


def build(tp_size, zero1):
    destroy_model_parallel()
    initialize_model_parallel(tp_size)
    model = Model()
    named = dict(model.named_parameters())
    groups = [{"params": [named[name] for name in names]} for names in (DECAYED, OTHERS)]
    if zero1:
        return model, NeuronZero1Optimizer(groups, torch.optim.AdamW, lr=1.0)
    return model, torch.optim.AdamW(groups, lr=1.0)


def load_and_compare(root, cases):
    """For each (folder, tag, tp, ZeRO-1): everything that was loaded is this rank's part of the whole."""
    found = []
    for folder, tag, tp_size, zero1, has_scheduler in cases:
        model, optimizer = build(tp_size, zero1)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer) if has_scheduler else None
        content = load_checkpoint(os.path.join(root, folder), tag, model, optimizer, scheduler)
        for name, parameter in model.named_parameters():
            rank = torch.distributed.get_rank() % tp_size
            assert torch.equal(parameter, part(name, whole(name), rank, tp_size)), (folder, name)
        for full_name, tensor in optimizer_state(model, optimizer).items():
            _, name, key = full_name.split("/")
            if key == "step":
                assert tensor == 5
                continue
            shards = (
                [(tensor, tuple(slice(None) for _ in tensor.shape))]
                if isinstance(tensor, torch.Tensor)
                else [(shard.tensor, shard.box.slices) for shard in tensor.shards]
            )
            for values, box in shards:
                assert torch.equal(values, whole(name, key)[box]), (folder, full_name)
        assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
        assert scheduler is None or scheduler.last_epoch == 4
        found.append(content)
    return found


def load_all(root, cases):
    """Also behind a URL, whose scheme says that it is this machine, so that ranks see the same."""
    behind_url = load_and_compare(f"local://{root}", [case for case in cases if case[0] in ("plain", "xser", "v1")])
    assert len(behind_url) == 4
    return load_and_compare(root, cases)


def test_legacy_checkpoints_load_at_their_degrees_and_at_others(run_ranks, tmp_path):
    write_v2(tmp_path / "plain", "step_9", 2, user_content={"total_steps": 9, "args": ("a", 1)})
    write_v2(tmp_path / "plain", "step_10", 2, user_content={"total_steps": 10})
    for tag in ("step_9", "step_10"):
        os.utime(tmp_path / "plain" / tag / "done", (1, 1))  # as a copy may leave them
    write_v2(tmp_path / "xser", "a", 2, xser=True)
    write_v2(tmp_path / "zero1", "a", 2, dp_size=3)
    write_v1(tmp_path / "v1", 2)
    write_v1(tmp_path / "v1-xser", 2, xser=True)

    cases = [
        ("plain", None, 2, False, True),
        ("plain", "step_9", 1, True, True),
        ("xser", None, 2, True, True),
        ("zero1", "a", 2, True, True),
        ("zero1", "a", 1, False, True),
        ("v1", None, 2, False, False),
        ("v1-xser", None, 1, False, False),
    ]
    contents = run_ranks(load_all, 2, str(tmp_path), cases)

    expected = [{"total_steps": 10}, {"total_steps": 9, "args": ("a", 1)}, None, None, None, None, None]
    assert contents == [expected, expected]


def test_whole_model_of_other_degrees_is_refused_where_it_cannot_be_told(tmp_path):
    write_v2(tmp_path, "a", 2)
    plain = Model()
    plain.gate_up = nn.Linear(4, 16)

    with pytest.raises(CheckpointError, match=r"gate_up\.\w+ is .* not an even split of a parallel layer"):
        load_checkpoint(tmp_path, model=plain)


def test_legacy_checkpoints_of_an_object_store_are_found_and_loaded(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    write_v2(tmp_path / "v2", "step_9", 1, user_content={"total_steps": 9})
    write_v2(tmp_path / "v2", "step_10", 1, xser=True)
    (tmp_path / "v2" / "step_10" / "done").unlink()
    write_v1(tmp_path / "v1", 1)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path), "/legacy", recursive=True)
    model = Model()

    for folder in ("v2", "v2/step_9", "v1"):
        assert has_checkpoint(f"memory://legacy/{folder}")
        nn.init.zeros_(model.norm.weight)
        content = load_checkpoint(f"memory://legacy/{folder}", model=model)
        assert content == ({"total_steps": 9} if folder != "v1" else None)
        assert torch.equal(model.norm.weight, whole("norm.weight"))
    assert not has_checkpoint("memory://legacy/v2/step_10")
    assert not has_checkpoint("memory://legacy/none")
    assert load_checkpoint("memory://legacy/none", model=model) is None
    memory.rm("/legacy", recursive=True)


def load_and_count_copies(url):
    """How often this rank copies the checkpoint, and a weight that it loads."""
    local = pytest.importorskip("fsspec.implementations.local")
    get, copies = local.LocalFileSystem.get, []

    def counting_get(*args, **kwargs):
        copies.append(args)
        return get(*args, **kwargs)

    model = Model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local.LocalFileSystem, "get", counting_get)
        load_checkpoint(url, model=model)
    return len(copies), model.norm.weight


def test_legacy_checkpoint_of_an_object_store_is_copied_once_per_host(tmp_path, run_ranks):
    pytest.importorskip("fsspec")
    write_v2(tmp_path, "a", 1)

    loaded = run_ranks(load_and_count_copies, 2, f"local://{tmp_path}")

    assert [copies for copies, _ in loaded] == [1, 0]
    assert all(torch.equal(weight, whole("norm.weight")) for _, weight in loaded)


def test_incomplete_legacy_checkpoint_is_none(tmp_path):
    write_v2(tmp_path, "a", 1)
    (tmp_path / "a" / "done").unlink()

    assert not has_checkpoint(tmp_path)


class Runs:
    """Whatever it is, unpickling it runs a command."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return (os.system, (f"touch {self.marker}",))


@pytest.mark.parametrize(
    "file",
    [
        "model/dp_rank_00_tp_rank_00_pp_rank_00.pt",
        "optim/dp_rank_00_tp_rank_00_pp_rank_00.pt",
        "scheduler.pt",
        "user_content.pt",
    ],
)
@pytest.mark.parametrize("legacy_pickle", [False, True])
def test_malicious_file_is_refused_before_anything_is_filled(tmp_path, file, legacy_pickle):
    marker = tmp_path / "marker"
    write_v2(tmp_path / "runs", "a", 1)
    path = tmp_path / "runs" / "a" / file
    if legacy_pickle:
        path.write_bytes(pickle.dumps(Runs(marker)))
    else:
        torch.save({"state": Runs(marker)}, path)
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [named[name] for name in names]} for names in (DECAYED, OTHERS)])

    with pytest.raises(CheckpointError, match=path.name):
        load_checkpoint(tmp_path / "runs", model=model, optimizer=optimizer)

    assert not marker.exists()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_legacy_pipeline_loads_into_one_process(tmp_path):
    folder = tmp_path / "a"
    (folder / "model").mkdir(parents=True)
    (folder / "optim").mkdir()
    (folder / "checkpoint").write_text("1")
    stages = (["embed.weight", "gate_up.weight", "gate_up.bias"], ["norm.weight", "down.weight"])
    for pp_rank, held in enumerate(stages):
        file = f"dp_rank_00_tp_rank_00_pp_rank_{pp_rank:02d}.pt"
        ordered = [name for name in DECAYED + OTHERS if name in held]  # each stage numbers its own
        state = {
            number: {"step": torch.tensor(5.0), "exp_avg": whole(name, "exp_avg")}
            for number, name in enumerate(ordered)
        }
        num_decayed = len(set(DECAYED) & set(held))
        groups = [
            {**GROUPS[0], "params": list(range(num_decayed))},
            {**GROUPS[1], "params": list(range(num_decayed, len(held)))},
        ]
        torch.save({name: whole(name) for name in held}, folder / "model" / file)
        torch.save({"state": state, "param_groups": groups}, folder / "optim" / file)
    (folder / "done").write_text("1")
    model = Model()
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [named[name] for name in names]} for names in (DECAYED, OTHERS)])

    load_checkpoint(tmp_path, model=model, optimizer=optimizer)

    for name, parameter in named.items():
        assert torch.equal(parameter, whole(name))
        assert torch.equal(optimizer.state[parameter]["exp_avg"], whole(name, "exp_avg"))


HIDDEN, HEAD = 6, 4
ROWS = {"q": 4 * HEAD, "k": 2 * HEAD, "v": 2 * HEAD}
# Which heads two ranks hold, where each key and value head has two copies: as ours lie, and as those of trn1 lie.
ORDERS = {
    "blocked": {"q": ([0, 1], [2, 3]), "k": ([0, 0], [1, 1])},
    "tiled": {"q": ([0, 2], [1, 3]), "k": ([0, 1], [0, 1])},
}


class Attention(nn.Module):
    def __init__(self, fuse_qkv):
        super().__init__()
        options = {"kv_size_multiplier": 2, "num_key_value_heads": 2, "fuse_qkv": fuse_qkv, "gather_output": False}
        self.qkv_proj = GQAQKVColumnParallelLinear(HIDDEN, [ROWS["q"], ROWS["k"]], **options)
        self.o_proj = RowParallelLinear(ROWS["q"], HIDDEN, bias=False, input_is_parallel=True)

    def forward(self, hidden):
        query, key, value = self.qkv_proj(hidden)
        return self.o_proj(query + key + value)


class Attentions(nn.Module):
    def __init__(self, fuse_qkv):
        super().__init__()
        self.layers = nn.ModuleList(Attention(fuse_qkv) for _ in range(2))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.mean()


def attention_of(layer, tp_rank, order, fuse_qkv, key=""):
    """What one of two ranks has of a layer, in an order of heads, by name."""

    def heads(name, projection, *shape):
        generator = torch.Generator().manual_seed(sum(map(ord, f"{layer}{name}{projection}{key}")))
        own = ORDERS[order]["q" if projection in "qo" else "k"][tp_rank]
        return torch.randn(ROWS.get(projection, ROWS["q"]), *shape, generator=generator).unflatten(0, (-1, HEAD))[own]

    held = {}
    for name, shape in (("weight", (HIDDEN,)), ("bias", ())):
        parts = {projection: heads(name, projection, *shape).flatten(0, 1) for projection in "qkv"}
        fused = {"qkv": torch.cat([*parts.values()])} if fuse_qkv else parts
        held |= {f"layers.{layer}.qkv_proj.{name}_{projection}": part for projection, part in fused.items()}
    return held | {f"layers.{layer}.o_proj.weight": heads("weight", "o", HIDDEN).flatten(0, 1).T.contiguous()}


def write_attentions(folder, pp_size, order, fuse_qkv):
    """`trainer.save_checkpoint` of both layers by two tensor-parallel ranks, with `pp_size` 2 a stage for each."""
    (folder / "model").mkdir(parents=True)
    (folder / "optim").mkdir()
    (folder / "checkpoint").write_text("1")
    for pp_rank in range(pp_size):
        layers = range(2) if pp_size == 1 else [pp_rank]
        for tp_rank in range(2):
            file = f"dp_rank_00_tp_rank_{tp_rank:02d}_pp_rank_{pp_rank:02d}.pt"
            model, momenta = (
                {
                    name: part
                    for layer in layers
                    for name, part in attention_of(layer, tp_rank, order, fuse_qkv, key).items()
                }
                for key in ("", "momentum")
            )
            state = {number: {"momentum_buffer": momentum} for number, momentum in enumerate(momenta.values())}
            torch.save(model, folder / "model" / file)
            torch.save({"state": state, "param_groups": [{"lr": 0.5, "params": [*state]}]}, folder / "optim" / file)
    (folder / "done").write_text("1")


def load_attentions(root, cases):
    for pp_size, (saved_pp_size, order, fuse_qkv) in itertools.product((1, 2), cases):
        destroy_model_parallel()
        initialize_model_parallel(2, pipeline_model_parallel_size=pp_size)
        torch.manual_seed(0)
        model = NxDPPModel(Attentions(fuse_qkv), transformer_layer_cls=Attention, auto_partition=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        load_checkpoint(os.path.join(root, f"{saved_pp_size}-{order}-{fuse_qkv}"), model=model, optimizer=optimizer)
        for name, parameter in model.local_named_parameters():
            at = (int(name.split(".")[1]), active_group("tp").rank, "blocked", fuse_qkv)
            assert torch.equal(parameter, attention_of(*at)[name]), (pp_size, saved_pp_size, order, name)
            assert torch.equal(optimizer.state[parameter]["momentum_buffer"], attention_of(*at, "momentum")[name]), name


def test_legacy_copied_heads_load_into_stages_and_into_one_in_both_orders(run_ranks, tmp_path):
    cases = [(1, "tiled", True), (2, "blocked", True), (2, "tiled", False)]
    for pp_size, order, fuse_qkv in cases:
        write_attentions(tmp_path / f"{pp_size}-{order}-{fuse_qkv}" / "a", pp_size, order, fuse_qkv)

    run_ranks(load_attentions, 4, str(tmp_path), cases)


def test_legacy_tiled_heads_without_one_output_projection_are_refused(run_ranks, tmp_path):
    write_attentions(tmp_path / "a", 1, "tiled", True)

    def load():
        initialize_model_parallel(2)
        model = Attentions(True)
        del model.layers[1].o_proj
        with pytest.raises(
            CheckpointError, match=r"layers\.1\.qkv_proj .* takes 16 features, found 0\. Use .*--hw_backend trn1"
        ):
            load_checkpoint(tmp_path, model=model, strict=False)

    run_ranks(load, 2)
