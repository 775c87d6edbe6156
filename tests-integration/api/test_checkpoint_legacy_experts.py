"""Checkpoints of mixtures of experts of NeuronX Distributed load at other tensor- and expert-parallel degrees."""

import os

import pytest
import torch
from nxd_ckpt import CheckpointError
from nxd_engine.checkpoints.load import load_checkpoint
from nxd_engine.checkpoints.optimizer_state import optimizer_state
from nxd_layers import ColumnParallelLinear
from nxd_layers.experts import ExpertMLPs
from nxd_state import active_group, destroy_model_parallel, initialize_model_parallel
from torch import nn

EXPERTS, HIDDEN, INNER = 4, 6, 8
SHAPES = {
    "head.weight": (8, HIDDEN),
    "experts.mlp_op.gate_up_proj.weight": (EXPERTS, HIDDEN, 2 * INNER),
    "experts.mlp_op.down_proj.weight": (EXPERTS, INNER, HIDDEN),
    "norm.weight": (HIDDEN,),
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = ColumnParallelLinear(HIDDEN, 8, bias=False)
        self.experts = ExpertMLPs(EXPERTS, 2, HIDDEN, INNER, hidden_act="silu", glu_mlp=True)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.zeros(HIDDEN))


def whole(name, key=""):
    generator = torch.Generator().manual_seed(sum(map(ord, name + key)))
    return torch.randn(SHAPES[name], generator=generator)


def part(name, tensor, tp, tp_size, ep, ep_size):
    """What a rank of NeuronX Distributed has of it; gate and up lie side by side."""
    if name == "head.weight":
        return tensor.chunk(tp_size)[tp].clone()
    if not name.startswith("experts."):
        return tensor
    own = tensor.chunk(ep_size)[ep]
    if name.endswith("gate_up_proj.weight"):
        return torch.cat([matrix.chunk(tp_size, dim=2)[tp] for matrix in own.chunk(2, dim=2)], dim=2)
    return own.chunk(tp_size, dim=1)[tp].clone()


def save_as_xser(content, path, *, is_first_expert_rank):
    """As a rank of NeuronX Distributed does: of what all expert-parallel ranks have alike only the first one's."""
    from nxd_ckpt.interop.neuronx.rank_files import save_skeleton

    os.makedirs(path + ".tensors")
    with open(path, "wb") as file:
        tensors = save_skeleton(content, file)
    named = {id(tensor): name for name, tensor in content.items()}
    info = {}
    for number, tensor in tensors.items():
        is_expert = named[id(tensor)].startswith("experts.")
        info[number] = {"dtype": tensor.dtype, "shape": tensor.shape, "expert_model_parallel": is_expert}
        if is_expert or is_first_expert_rank:
            torch.save(tensor, f"{path}.tensors/tensor_{number}.pt")
    torch.save(info, f"{path}.info.pt")


def write(folder, tp_size, ep_size, *, xser):
    """`trainer.save_checkpoint` with expert parallelism: a file for each expert- and tensor-parallel rank."""
    (folder / "model").mkdir(parents=True)
    (folder / "optim").mkdir()
    (folder / "checkpoint").write_text("1")
    for tp in range(tp_size):
        for ep in range(ep_size):
            file = f"dp_rank_00_ep_rank_{ep:02d}_tp_rank_{tp:02d}_pp_rank_00.pt"
            at = (tp, tp_size, ep, ep_size)
            model = {name: part(name, whole(name), *at) for name in SHAPES}
            if xser:
                save_as_xser(model, str(folder / "model" / file), is_first_expert_rank=ep == 0)
            else:
                torch.save(model, folder / "model" / file)
            state = {
                number: {
                    "step": torch.tensor(5.0),
                    **{key: part(name, whole(name, key), *at) for key in ("exp_avg", "exp_avg_sq")},
                }
                for number, name in enumerate(SHAPES)
            }
            groups = [{"lr": 0.25, "weight_decay": 0.1, "params": list(range(len(SHAPES)))}]
            torch.save({"state": state, "param_groups": groups}, folder / "optim" / file)
    (folder / "done").write_text("1")


def load_and_compare(folder, degrees):
    for tp_size, ep_size in degrees:
        destroy_model_parallel()
        initialize_model_parallel(tp_size, expert_model_parallel_size=ep_size)
        model = Model()
        named = dict(model.named_parameters())
        optimizer = torch.optim.AdamW([named[name] for name in SHAPES], lr=1.0)
        load_checkpoint(folder, model=model, optimizer=optimizer)
        at = (active_group("tp").rank, tp_size, active_group("ep").rank, ep_size)
        for name, parameter in named.items():
            assert torch.equal(parameter, part(name, whole(name), *at)), (tp_size, ep_size, name)
        for full_name, state in optimizer_state(model, optimizer).items():
            _, name, key = full_name.split("/")
            if key == "step":
                assert state == 5
            else:
                shards = (
                    [(state, ...)]
                    if isinstance(state, torch.Tensor)
                    else [(shard.tensor, shard.box.slices) for shard in state.shards]
                )
                for values, box in shards:
                    assert torch.equal(values, whole(name, key)[box]), (tp_size, ep_size, full_name)
        assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("xser", [False, True], ids=["plain", "xser"])
def test_experts_saved_at_tp_and_ep_load_at_any(run_ranks, tmp_path, xser):
    write(tmp_path / "a", 2, 2, xser=xser)

    run_ranks(load_and_compare, 4, str(tmp_path), [(2, 2), (2, 1), (1, 2), (1, 4), (4, 1)])


def test_experts_saved_without_expert_parallelism_load_with_it(run_ranks, tmp_path):
    write(tmp_path / "a", 2, 1, xser=False)

    run_ranks(load_and_compare, 4, str(tmp_path), [(2, 2), (1, 4)])


def test_zero1_states_of_split_experts_are_refused_and_the_model_loads_without(tmp_path):
    write(tmp_path / "a", 1, 2, xser=False)
    for ep in range(2):
        of_expert_rank = tmp_path / f"a/optim/dp_rank_00_ep_rank_0{ep}_tp_rank_00_pp_rank_00.pt"
        of_expert_rank.rename(tmp_path / f"a/optim/dp_rank_0{ep}_tp_rank_00_pp_rank_00.pt")
    model = Model()

    with pytest.raises(CheckpointError, match=r"do not say which rank has which expert; leave out optimizer="):
        load_checkpoint(tmp_path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    load_checkpoint(tmp_path, model=model)

    assert all(torch.equal(parameter, whole(name)) for name, parameter in model.named_parameters())
