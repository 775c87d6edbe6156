"""One of three ranks of `test_fsdp.py`: trains with FSDP2 and saves in every form that `open_fsdp` reads.

python fsdp_rank.py RANK FOLDER
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS = 3
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Model(nn.Module):
    """Rows that three ranks do not divide, a part that no optimizer has, and names that look like states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.state = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 5))
        self.frozen = nn.Linear(5, 2).requires_grad_(requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.state(rows))


class AppState(Stateful):
    """As torch's recipe for distributed checkpoints has it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict:
        weights, states = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optim": states}


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after two steps; sharded if there are ranks."""
    model = Model()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (RANKS,))
        for part in (model.state[0], model.state[1], model):
            fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        model(torch.arange(12.0).reshape(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_alone(file: Path) -> None:
    """Save what this process has when it trains without the others, by the names of `open_fsdp`."""
    model, optimizer = trained()
    names = {parameter: name for name, parameter in model.named_parameters()}
    states = {
        f"optimizer/{names[parameter]}/{key}": value
        for parameter, of_parameter in optimizer.state.items()
        for key, value in of_parameter.items()
    }
    torch.save((dict(model.state_dict()), states), file)


def main(rank: int, folder: Path) -> None:
    if rank == 0:
        save_alone(folder / "alone.pt")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    model, optimizer = trained()
    weights, states = get_state_dict(model, optimizer)
    scheduler = {"scheduler": {"averages": torch.ones(2)}}
    dcp.save({"model": weights, "optim": states, "step": 2, **scheduler}, checkpoint_id=folder / "torch")
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=folder / "recipe")
    dcp.save({"model": get_model_state_dict(model), **scheduler}, checkpoint_id=folder / "weights")
    dcp.save(get_model_state_dict(model), checkpoint_id=folder / "weights at the top")
    _, flat = get_state_dict(model, optimizer, options=FLAT)
    dcp.save({**weights, "optimizer": flat, "train_state": {"step": 2}}, checkpoint_id=folder / "torchtitan")
    dcp.save({"model": weights}, checkpoint_id=folder / "accelerate" / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": states}, checkpoint_id=folder / "accelerate" / "optimizer_0")
    weights, states = get_state_dict(model, optimizer, options=WHOLE)
    if rank == 0:
        (folder / "accelerate, whole").mkdir()
        torch.save(weights, folder / "accelerate, whole" / "pytorch_model_fsdp.bin")
        torch.save(states, folder / "accelerate, whole" / "optimizer.bin")
    dist.barrier()
    os._exit(0)  # see dcp_rank.py


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
