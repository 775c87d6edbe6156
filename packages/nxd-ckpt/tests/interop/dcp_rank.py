"""One of two ranks of `test_torch_dcp.py`: saves and loads through torch's distributed checkpoint, and looks at it.

python dcp_rank.py RANK FOLDER
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from nxd_ckpt.interop import open_torch_dcp, save_source, write_torch_dcp
from nxd_ckpt.interop.torch_dcp import NxdStorageReader, NxdStorageWriter
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

WEIGHT = torch.arange(48.0).reshape(8, 6)
UNEVEN = torch.arange(15).reshape(5, 3).to(torch.bfloat16)


def state_at(placement, *, zeros: bool = False) -> dict:
    mesh = init_device_mesh("cpu", (2,))
    whole = {"weight": WEIGHT, "uneven": UNEVEN, "norm": torch.arange(6.0)}
    whole = {name: torch.zeros_like(tensor) if zeros else tensor for name, tensor in whole.items()}
    sharded = {name: distribute_tensor(whole[name], mesh, [placement]) for name in ("weight", "uneven")}
    settings = {"lr": 0.0, "betas": (0.0, 0.0)} if zeros else {"lr": 0.1, "betas": (0.9, 0.95)}
    return {"model": sharded | {"norm": whole["norm"]}, "optimizer": settings}


def check(state: dict) -> None:
    for name, expected in (("weight", WEIGHT), ("uneven", UNEVEN), ("norm", torch.arange(6.0))):
        found = state["model"][name]
        assert torch.equal(found.full_tensor() if isinstance(found, DTensor) else found, expected), name
    assert state["optimizer"] == {"lr": 0.1, "betas": (0.9, 0.95)}


class FailingPlanner(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item):
        if dist.get_rank() == 1:
            raise ValueError("the weights have gone")
        return super().resolve_data(write_item)


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    dcp.save(state_at(Shard(0)), checkpoint_id=folder / "torchs", no_dist=False)
    dcp.save(state_at(Shard(0)), storage_writer=NxdStorageWriter(folder / "ours", "step-1", step=1))
    dcp.save(state_at(Shard(1)), checkpoint_id=folder / "ours" / "step-2", storage_writer=NxdStorageWriter("", "x"))
    for placement in (Shard(0), Shard(1), Replicate()):
        for tag in ("step-1", "step-2"):
            state = state_at(placement, zeros=True)
            dcp.load(state, storage_reader=NxdStorageReader(folder / "ours", tag))
            check(state)
    if rank == 0:  # by one process alone, though there are more
        save_source(open_torch_dcp(folder / "torchs"), folder / "imported", "a")
        write_torch_dcp(open_torch_dcp(folder / "torchs"), folder / "again")
    if rank == 1:  # alone, with rank 0 elsewhere
        dcp.save({"w": WEIGHT}, storage_writer=NxdStorageWriter(folder / "alone", "a"), no_dist=True)
        state = {"w": torch.zeros(8, 6)}
        dcp.load(state, storage_reader=NxdStorageReader(folder / "alone"), no_dist=True)
        assert torch.equal(state["w"], WEIGHT)
    staged = state_at(Shard(0))
    saving = dcp.async_save(staged, storage_writer=NxdStorageWriter(folder / "async", "a"))
    staged["model"]["weight"].to_local().zero_()
    saving.result()
    try:
        dcp.save(state_at(Shard(0)), storage_writer=NxdStorageWriter(folder / "ours", "bad"), planner=FailingPlanner())
    except dcp.CheckpointException as error:
        print(f"rank {rank} heard: {error}", flush=True)
    dist.barrier()
    os._exit(0)  # torch's own threads can abort an interpreter that ends while one of them lets go of a message


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
