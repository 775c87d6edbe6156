"""A small Llama in stages of `torch.distributed.pipelining`, cut by hand or by its tracer; alone on one process."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining

VOCABULARY, HIDDEN, HEADS, LAYERS, ROWS, LENGTH, MICROBATCHES = 32, 16, 2, 8, 8, 6, 4
SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb": pipelining.ScheduleInterleavedZeroBubble,
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate, self.up = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Stage(nn.Module):
    """Some layers, counted from 0 in each stage."""

    def __init__(self, llama, number, stages, first):
        super().__init__()
        size = LAYERS // stages
        self.embedding = llama.embedding if number == 0 else None
        self.layers = llama.layers[first : first + size]
        self.norm, self.head = (llama.norm, llama.head) if number == stages - 1 else (None, None)

    def forward(self, x):
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def add_up_tied(stages, fault, is_first, is_last):
    """Add up the gradients of the tied embedding, which the first and the last stage have."""
    weight = stages[0].embedding.weight if is_first else stages[-1].head.weight if is_last else None
    if fault != "tied":
        total = torch.zeros(VOCABULARY, HIDDEN) if weight is None else weight.grad.clone()
        dist.all_reduce(total)
        if weight is not None:
            weight.grad.copy_(total)


def clip(parameters, copy, fault):
    """Clip by the norm of all stages' gradients; that of the copy of a tied weight counts once."""
    norm = nn.utils.get_total_norm([it.grad for it in parameters if it.grad is not None and it is not copy])
    if dist.is_initialized() and fault != "clip":
        squared = norm.square()
        dist.all_reduce(squared)
        norm = squared.sqrt()
    nn.utils.clip_grads_with_norm_(parameters, 0.5, norm)


def stages_by_hand(llama, schedule, tied, fault):
    """Return this rank's stages: the modules, and the copy of the embedding that the last one has if it is tied."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    several = 2 if schedule in ("interleaved", "zb") else 1
    mine = [rank + ranks * chunk for chunk in range(several)]
    is_early = fault == "layer" and rank == 1
    first = [LAYERS // (ranks * several) * number - (1 if is_early else 0) for number in mine]
    modules = [Stage(llama, number, ranks * several, it) for number, it in zip(mine, first, strict=True)]
    copy = None
    if tied and rank == ranks - 1:
        copy = modules[-1].head.weight = nn.Parameter(modules[-1].head.weight.detach().clone())
    stages = [
        pipelining.PipelineStage(module, number, ranks * several, torch.device("cpu"))
        for module, number in zip(modules, mine, strict=True)
    ]
    return stages, modules, copy


def traced_stage(llama):
    """Return this rank's stage of a traced model."""
    ranks = dist.get_world_size()
    points = [f"layers.{LAYERS // ranks * number}" for number in range(1, ranks)]
    rows = batch(0)[0].chunk(MICROBATCHES)[0]
    pipe = pipelining.pipeline(
        llama, mb_args=(rows,), split_spec=dict.fromkeys(points, pipelining.SplitPoint.BEGINNING)
    )
    stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
    return [stage], [stage.submod], None


def step_of_pipeline(schedule, modules, tied, tokens, labels, fault):
    """Run a step's microbatches; gradients are then there."""
    is_first, is_last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
    if fault == "order":  # each microbatch has the labels of another one
        labels = labels.roll(ROWS // MICROBATCHES, 0)
    schedule.step(*([tokens] if is_first else []), **({"target": labels} if is_last else {}))
    if tied:
        add_up_tied(modules, fault, is_first, is_last)
    if fault == "unused" and dist.get_rank() == 1:
        for parameter in modules[0].layers[1].parameters():
            parameter.grad = None


def train(*, schedule="gpipe", cut="hand", tied=False, fault="", steps=2):
    """Train alone, or in the stages of a pipeline if there are ranks."""
    llama, copy = Llama(), None
    if tied:
        llama.head.weight = llama.embedding.weight
    if dist.is_initialized():
        stages, modules, copy = stages_by_hand(llama, schedule, tied, fault) if cut == "hand" else traced_stage(llama)
        given = stages if schedule in ("interleaved", "zb") else stages[0]
        pipeline = SCHEDULES[schedule](given, MICROBATCHES, loss_fn=loss_of, scale_grads=fault != "scale")
    else:
        modules = [llama]
    parameters = [it for module in modules for it in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, 1e-2)
    for step in range(steps):
        tokens, labels = batch(step)
        if dist.is_initialized():
            step_of_pipeline(pipeline, modules, tied, tokens, labels, fault)
        else:
            loss_of(llama(tokens), labels).backward()
        clip(parameters, copy, fault)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="gpipe")
    parser.add_argument("--cut", default="hand")
    parser.add_argument("--fault", default="")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train(schedule=options.schedule, cut=options.cut, fault=options.fault)
