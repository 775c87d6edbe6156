"""Training by Lightning's Trainer and its own strategies; the Trainer starts its ranks itself, or torchrun does."""

import argparse
import warnings

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY, HIDDEN, LENGTH, ROWS, ACCUMULATED = 32, 16, 6, 4, 2


class Texts(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


class Block(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.norm, self.dropout = nn.LayerNorm(HIDDEN), nn.Dropout(0.2 if fault.startswith("dropout") else 0.0)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False), nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block(fault) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Training(LightningModule):
    def __init__(self, fault, *, is_split):
        super().__init__()
        self.fault, self.is_split = fault, is_split
        self.model = Model(fault)

    def configure_model(self):
        mesh = getattr(self, "_device_mesh", None)
        if mesh is None or isinstance(self.model.head.weight, torch.distributed.tensor.DTensor):
            return
        if mesh["tensor_parallel"].size() > 1:
            for block in self.model.blocks:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                if self.fault == "row":  # its parts of a sum are taken for the sum
                    plan["down"] = RowwiseParallel(output_layouts=torch.distributed.tensor.Partial())
                parallelize_module(block, mesh["tensor_parallel"], plan)
        if mesh["data_parallel"].size() > 1:
            for module in (*self.model.blocks, self.model):
                fully_shard(module, mesh=mesh["data_parallel"])

    def training_step(self, batch, number):
        logits = self.model(batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        return loss * (self.trainer.world_size if self.fault == "sum" else 1)

    def on_before_optimizer_step(self, optimizer):
        if self.fault == "reduced again":
            for parameter in self.parameters():
                torch.distributed.all_reduce(parameter.grad)

    def train_dataloader(self):
        if self.fault == "rows":  # Lightning's own sampler shuffles on several ranks, but not on one
            return DataLoader(Texts(), batch_size=ROWS // self.trainer.world_size)
        replicas = 1 if self.is_split else self.trainer.world_size
        sampler = DistributedSampler(Texts(), replicas, self.global_rank % replicas, shuffle=False)
        return DataLoader(Texts(), batch_size=ROWS // replicas, sampler=sampler)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def train(*, strategy="auto", clip=None, fault="", steps=2):
    warnings.filterwarnings("ignore")
    seed_everything(0, verbose=False)
    devices = 1 if strategy == "auto" else 2
    parallel = {
        "fsdp2": ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1),
        "tp": ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=devices),
    }.get(strategy, strategy)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=parallel,
        max_steps=steps,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=fault == "rows",
    )
    trainer.fit(Training(fault, is_split=strategy == "tp"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--fault", default="")
    options = parser.parse_args()
    train(strategy=options.strategy, clip=options.clip, fault=options.fault)
