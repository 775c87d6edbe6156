"""Training by Accelerate: the program calls `prepare`, `accumulate` and `clip_grad_norm_` itself."""

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY, HIDDEN, LENGTH, ROWS, ACCUMULATED = 32, 16, 6, 4, 3


class Texts(Dataset):
    """Rows of tokens; every second pair, which another rank gets, has few labels."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        labels = tokens[1:].clone()
        labels[: 4 * (index // 2 % 2)] = -100
        return {"tokens": tokens[:-1], "labels": labels}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.adapter = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.adapter(x))


def train(*, plugin="ddp", fault="", steps=2):
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    plugins = {}
    if plugin == "fsdp" and ranks > 1:
        from accelerate import FullyShardedDataParallelPlugin

        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, **plugins)
    if plugins:  # Accelerate refuses FSDP on CPUs, though it works there
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugins["fsdp_plugin"]
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = DataLoader(Texts(), batch_size=ROWS // ranks)
    model, optimizer, prepared = accelerator.prepare(model, optimizer, loader)
    loader = loader if fault == "rows" else prepared  # each rank has the same rows
    called = model
    if fault == "unwrapped":  # backward goes past DDP
        called = accelerator.unwrap_model(model)
    batches = iter(loader)
    for _ in range(steps):
        window = [next(batches) for _ in range(ACCUMULATED)]
        count = torch.tensor(float(sum((it["labels"] != -100).sum() for it in window)))
        if fault != "local count":
            count = accelerator.reduce(count, "sum")
        for batch in window:
            with accelerator.accumulate(model):
                logits = called(batch["tokens"])
                if fault == "mean":  # each rank's mean, and then the mean of ranks
                    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
                else:
                    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / count
                    # Accelerate divides by the microbatches, and DDP by the ranks
                    scale = 1 if fault == "divided" else ACCUMULATED
                    loss = loss * scale * (1 if fault == "local count" else ranks)
                accelerator.backward(loss)
                if fault == "local clip":
                    if accelerator.sync_gradients:
                        local = [it.grad.to_local() for it in model.parameters()]  # the shard of this rank
                        nn.utils.clip_grads_with_norm_(model.parameters(), 0.3, nn.utils.get_total_norm(local))
                elif accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugin", default="ddp")
    parser.add_argument("--fault", default="")
    options = parser.parse_args()
    train(plugin=options.plugin, fault=options.fault)
