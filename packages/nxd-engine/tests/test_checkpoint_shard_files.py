"""`parallel_layers.save` and `load`: the files of NeuronX Distributed's v1 layout."""

import os

import pytest
import torch
from nxd_ckpt import CheckpointError
from nxd_engine.checkpoints.shard_files import load, save
from torch import nn


def save_and_load(root, xser):
    """Both ranks' round trip, and what lies on the disk."""
    from nxd_layers import ColumnParallelLinear
    from nxd_state import initialize_model_parallel

    initialize_model_parallel(tensor_model_parallel_size=2)
    torch.manual_seed(0)
    model, other = nn.Sequential(ColumnParallelLinear(4, 6)), nn.Sequential(ColumnParallelLinear(4, 6))
    save({"model": model.state_dict(), "epoch": 3}, root, save_xser=xser, save_serially=xser)
    rest = load(root, model_or_optimizer=other, load_xser=xser)
    assert torch.equal(other[0].weight, model[0].weight)
    assert rest == {"epoch": 3}
    assert torch.equal(load(root)["model"]["0.weight"], model[0].weight)
    return model.state_dict()


@pytest.mark.parametrize("xser", [False, True])
def test_each_rank_gets_back_what_it_saved_in_the_documented_files(run_ranks, tmp_path, xser):
    states = run_ranks(save_and_load, 2, str(tmp_path), xser)

    names = ["tp_rank_00_pp_rank_00", "tp_rank_01_pp_rank_00"]
    if xser:
        assert sorted(os.listdir(tmp_path)) == sorted([*names, *(name + ".tensors" for name in names)])
        assert torch.equal(torch.load(tmp_path / "tp_rank_01_pp_rank_00.tensors/tensor_0.pt"), states[1]["0.weight"])
    else:
        assert sorted(os.listdir(tmp_path)) == names
        content = torch.load(tmp_path / names[1] / "checkpoint.pt", weights_only=True)
        assert content["epoch"] == 3
        assert torch.equal(content["model"]["0.weight"], states[1]["0.weight"])


def slice_whole(path):
    from nxd_layers import ColumnParallelLinear, RowParallelLinear
    from nxd_state import initialize_model_parallel

    initialize_model_parallel(tensor_model_parallel_size=2)
    model = nn.Sequential(ColumnParallelLinear(4, 6), nn.LayerNorm(6), RowParallelLinear(6, 4))
    load(path, model_or_optimizer=model, sharded=False)
    with pytest.raises(CheckpointError, match=r"it lacks 3\.bias, 3\.weight"):
        load(path, model_or_optimizer=nn.Sequential(*model, nn.Linear(4, 4)), sharded=False)
    return model.state_dict()


def test_each_rank_takes_its_part_of_a_whole_state_dict(run_ranks, tmp_path):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4)).state_dict()
    torch.save({"model": whole}, tmp_path / "whole.pt")

    states = run_ranks(slice_whole, 2, str(tmp_path / "whole.pt"))

    for rank, state in enumerate(states):
        assert torch.equal(state["0.weight"], whole["0.weight"][3 * rank : 3 * rank + 3])
        assert torch.equal(state["1.weight"], whole["1.weight"])
        assert torch.equal(state["2.weight"], whole["2.weight"][:, 3 * rank : 3 * rank + 3])


def test_down_cast_bf16_converts_wide_floats_only(tmp_path):
    state = {
        "wide": torch.ones(2),
        "half": torch.ones(2, dtype=torch.float16),
        "count": torch.ones(2, dtype=torch.long),
    }

    save(state, tmp_path, down_cast_bf16=True)

    found = {name: tensor.dtype for name, tensor in load(tmp_path).items()}
    assert found == {"wide": torch.bfloat16, "half": torch.float16, "count": torch.int64}


def test_part_of_a_large_memory_is_saved_alone_and_tied_tensors_stay_tied(tmp_path):
    large = torch.arange(100_000.0)
    tied = torch.ones(1000)

    save({"part": large[:3], "a": tied, "b": tied}, tmp_path)

    found = load(tmp_path)
    assert torch.equal(found["part"], large[:3])
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert (tmp_path / "tp_rank_00_pp_rank_00/checkpoint.pt").stat().st_size < 20_000


def test_a_later_save_of_the_other_kind_replaces_the_files(tmp_path):
    for number, xser in enumerate([False, True, False, True]):
        save({"a": torch.full((2,), float(number))}, tmp_path, save_xser=xser)
        assert load(tmp_path)["a"].tolist() == [number, number]


def test_optimizer_takes_its_state(tmp_path):
    model = nn.Linear(2, 2)
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9) for lr in (0.1, 0.2))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save({"optimizer": optimizer.state_dict()}, tmp_path)

    load(tmp_path, other, model_key="optimizer")

    assert other.param_groups[0]["lr"] == 0.1
    assert torch.equal(other.state[model.weight]["momentum_buffer"], optimizer.state[model.weight]["momentum_buffer"])


class Runs:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return (os.system, (f"touch {self.marker}",))


def test_code_is_neither_saved_nor_run(tmp_path):
    marker = tmp_path / "marker"
    with pytest.raises(ValueError, match="could run code"):
        save({"a": Runs(marker)}, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    folder = tmp_path / "loaded" / "tp_rank_00_pp_rank_00"
    folder.mkdir(parents=True)
    torch.save({"model": Runs(marker)}, folder / "checkpoint.pt")

    with pytest.raises(CheckpointError, match="could run code"):
        load(tmp_path / "loaded", nn.Linear(1, 1))

    assert not marker.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"model_key": "missing", "model_or_optimizer": nn.Linear(1, 1)},
            "no state under model_key='missing'; found: model",
        ),
        ({"sharded": False}, "sharded=False needs the model"),
    ],
)
def test_wrong_argument_is_named(tmp_path, arguments, message):
    save({"model": {}}, tmp_path)

    with pytest.raises((CheckpointError, ValueError), match=message):
        load(tmp_path, **arguments)


def test_what_is_no_state_of_the_target_is_named(tmp_path):
    model = nn.Linear(1, 1)
    save({"model": model.state_dict()}, tmp_path / "saved")
    torch.save({"model": {"weight": 3, "bias": torch.ones(1)}}, tmp_path / "whole.pt")

    with pytest.raises(CheckpointError, match="not an optimizer's state; pass the model_key="):
        load(tmp_path / "saved", torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(CheckpointError, match="weight is a int; it must be a tensor"):
        load(tmp_path / "whole.pt", model, sharded=False)


def test_other_degrees_are_refused_with_advice(tmp_path):
    for rank in range(2):
        folder = tmp_path / f"tp_rank_{rank:02d}_pp_rank_00"
        folder.mkdir()
        torch.save({}, folder / "checkpoint.pt")

    with pytest.raises(CheckpointError, match=r"saved at TP 2 x PP 1, but this run has TP 1 x PP 1.*load_checkpoint"):
        load(tmp_path)
