"""A program that ends in some way while a save is under way: python program.py FOLDER WAY [RANK]."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from nxd_ckpt import async_save, save

folder, way = Path(sys.argv[1]), sys.argv[2]
print("main module", flush=True)


def join_process_group(rank):
    """Rank 0 hosts the store on a port that the system picks."""
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("localhost", 0, world_size=2, is_master=True, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("localhost", int(port.read_text()))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


root = folder / "root"
state = {"w": torch.full((200_000,), 2.0)}
if way == "process group":
    join_process_group(int(sys.argv[3]))
    async_save(root, "t", state)
    dist.destroy_process_group()
elif way == "fork":
    join_process_group(int(sys.argv[3]))
    async_save(root, "t", {"w": torch.ones(200_000)})
    child = os.fork()
    if child == 0:
        try:
            save(root, "of the child", state)
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    save(root, "t", state, overwrite=True)
    dist.barrier()  # rank 0 has the store, which rank 1 may still read
    dist.destroy_process_group()
elif way == "failure":
    (root / "folder").mkdir(parents=True)
    async_save(root, "folder", state)
else:
    save(root, "t", {"w": torch.ones(200_000)})
    async_save(root, "t", state, overwrite=True)
    if way == "exception":
        raise SystemExit(3)
    if way == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
