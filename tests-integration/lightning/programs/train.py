"""A script as users write it: `python train.py` starts two ranks, under torchrun it is one. It can be made to fail.

python train.py FOLDER none|rank0|rank1|interrupt|stranger
"""

import os
import signal
import subprocess
import sys

import neuronx_distributed as nxd
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from neuronx_distributed.lightning import NeuronLTModule, NeuronXLAPrecisionPlugin, NeuronXLAStrategy
from nxd_layers import ColumnParallelLinear
from torch.utils.data import DataLoader

folder, failure = sys.argv[1:]
nxd_config = nxd.neuronx_distributed_config(tensor_parallel_size=2)


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = ColumnParallelLinear(4, 4)

    def forward(self, values):
        return (self.linear(values) - 1).square().mean()


def ask_store(user):
    """What the ranks' store answers to the greeting of torch's clients."""
    program = f"""
import os, socket, sys
os.setgroups([]), os.setgid({user}), os.setuid({user})
client = socket.socket()
client.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
try:
    client.sendall(b"\\0" + (0x3C85F7CE).to_bytes(4, sys.byteorder) + b"\\x0d" + b"ping")
    print(client.recv(4))
except ConnectionError:
    print(b"")
"""
    return subprocess.run([sys.executable, "-c", program], check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


class Module(NeuronLTModule):
    def on_train_batch_end(self, *arguments):
        loss = float(self.trainer.callback_metrics["loss"])
        print(f"rank {self.global_rank} step {self.global_step} loss {loss:.6f}", flush=True)
        if failure == f"rank{self.global_rank}":
            raise ValueError("this rank was told to fail")
        if failure == "interrupt" and self.global_rank == 0:
            os.killpg(os.getpgid(0), signal.SIGINT)
        if failure == "stranger" and self.global_rank == 0:
            print(f"store answers {ask_store(0)} to this user, {ask_store(65534)} to another", flush=True)


seed_everything(1)
module = Module(Regression, nxd_config, torch.optim.SGD, opt_kwargs={"lr": 0.1})
trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy=NeuronXLAStrategy(nxd_config),
    plugins=[NeuronXLAPrecisionPlugin()],
    # Both ask for what takes all ranks, on the one that fails.
    callbacks=[OnExceptionCheckpoint(folder), ModelCheckpoint(folder, save_on_exception=True, save_last=True)],
    max_steps=2,
    default_root_dir=folder,
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(module, DataLoader(torch.arange(16.0).view(4, 4) / 16, batch_size=2))
