"""A run that stops and resumes: its config at any layout, and its steps."""

import torch
from neuronx_distributed.trainer import neuronx_distributed_config
from nxd_engine.models import LlamaDecoderLayer
from nxd_state import active_group, all_reduce, destroy_model_parallel

VOCABULARY = 24


def config_of(tp, pp, **settings):
    """A config for these degrees, after the mesh before it, if any, has ended."""
    destroy_model_parallel()
    stages = {
        "transformer_layer_cls": LlamaDecoderLayer,
        "num_microbatches": 2,
        "input_names": ["input_ids", "labels"],
        "auto_partition": True,
        "broadcast_and_average_loss": True,
    }
    return neuronx_distributed_config(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        pipeline_config=stages if pp > 1 else None,
        **settings,
    )


def train(model, optimizer, scheduler, steps):
    """The mean loss of each step over the replicas, which have four sequences between them."""
    replicas = active_group("dp")
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (4, 9), generator=generator)[replicas.rank :: replicas.size]
        loss = model.run_train(input_ids=tokens[:, :-1], labels=tokens[:, 1:])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(all_reduce(loss.detach().double(), replicas, op="avg")))
    return losses
