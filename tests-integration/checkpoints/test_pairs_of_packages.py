"""Each package with nxd-ckpt and without nxd-trainer: what one layout has trained and saved, another loads and goes on.

The step after a load is compared with that of one process that never stopped.
"""

from collections.abc import Callable
from dataclasses import dataclass

import nxd_ckpt
import pytest
import torch
from nxd_layers import ColumnParallelLinear, ParallelEmbedding, RMSNorm, RowParallelLinear
from nxd_layers.experts import ExpertMLPs, MoE, RouterTopK
from nxd_layers.qkv_linear import GQAQKVColumnParallelLinear
from nxd_lora import LoraConfig, LoraModel
from nxd_optim import GradientReducer, NeuronZero1Optimizer
from nxd_pipeline import NxDPPModel
from nxd_state import active_group, initialize_model_parallel
from nxd_trace import parallel_model_trace
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, HEAD, BATCH, STEPS = 12, 8, 2, 4, 2
Layout = tuple[int, ...]  # tensor-, pipeline- and data-parallel degrees, and that of experts if above 1


class Layer(nn.Module):
    """Fused queries, keys and values with repeated heads, a strided pair of matrices, and a norm."""

    def __init__(self, fused=True):
        super().__init__()
        self.norm = RMSNorm(WIDTH, dtype=torch.float64)
        self.qkv_proj = GQAQKVColumnParallelLinear(
            WIDTH,
            [4 * HEAD, 2 * HEAD],
            bias=False,
            gather_output=False,
            fuse_qkv=fused,
            kv_size_multiplier=max(1, active_group("tp").size // 2),
            num_key_value_heads=2,
            dtype=torch.float64,
        )
        self.o_proj = RowParallelLinear(4 * HEAD, WIDTH, bias=True, input_is_parallel=True, dtype=torch.float64)
        self.gate_up = ColumnParallelLinear(WIDTH, 4 * WIDTH, stride=2, gather_output=False, dtype=torch.float64)
        self.down = RowParallelLinear(2 * WIDTH, WIDTH, input_is_parallel=True, dtype=torch.float64)

    def forward(self, hidden):  # [batch, width]
        q, k, v = self.qkv_proj(self.norm(hidden))
        repeats = q.shape[-1] // k.shape[-1]
        mixed = q * torch.tanh(k.unflatten(-1, (-1, HEAD)).repeat_interleave(repeats, -2).flatten(-2))
        hidden = hidden + self.o_proj(mixed + v.unflatten(-1, (-1, HEAD)).repeat_interleave(repeats, -2).flatten(-2))
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = ParallelEmbedding(VOCAB, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList([Layer(), Layer(fused=False)])
        self.head = ColumnParallelLinear(WIDTH, VOCAB, bias=False, gather_output=True, dtype=torch.float64)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens, labels):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden), labels)


class ModelOfExperts(nn.Module):
    """A layer of experts, and a head that tensor-parallel ranks split."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)
        experts = ExpertMLPs(4, 2, WIDTH, 6, glu_mlp=True, normalize_top_k_affinities=True, dtype=torch.float64)
        self.experts = MoE(RouterTopK(4, 2, WIDTH, dtype=torch.float64), experts)
        self.head = ColumnParallelLinear(WIDTH, VOCAB, bias=False, gather_output=True, dtype=torch.float64)

    def forward(self, tokens, labels):
        hidden = self.embed(tokens).unsqueeze(1)  # [batch, 1, width]: rows are told apart by the sequence alone
        return F.cross_entropy(self.head(hidden + self.experts(hidden)[0]).squeeze(1), labels)


def with_adapters(model):
    return LoraModel(model, LoraConfig(lora_rank=2, target_modules=["qkv_proj", "o_proj", "down"], lora_dropout=0.0))


@dataclass(frozen=True)
class Pair:
    """Packages in use together, and how their parts are made."""

    model: Callable[[], nn.Module] = Model
    zero1: bool = False
    optimizer: type = torch.optim.AdamW


PAIRS = {
    "layers": Pair(),
    "layers and optim": Pair(zero1=True),
    "layers with LoRA": Pair(model=lambda: with_adapters(Model())),
    "layers with LoRA and optim": Pair(model=lambda: with_adapters(Model()), zero1=True),
    "tied layers and optim": Pair(model=lambda: Model(tied=True), zero1=True),
    "experts": Pair(model=ModelOfExperts),
    "experts and optim": Pair(model=ModelOfExperts, zero1=True),
}
CASES = [  # who saves at which layout, and who loads at which
    ("layers", (2, 1, 1), "layers", (1, 1, 1)),
    ("layers", (1, 1, 1), "layers", (4, 1, 1)),
    ("layers", (2, 1, 2), "layers and optim", (1, 1, 2)),
    ("layers and optim", (2, 1, 2), "layers", (2, 1, 1)),
    ("layers and optim", (1, 1, 4), "layers and optim", (2, 1, 2)),
    ("layers with LoRA", (2, 1, 1), "layers with LoRA and optim", (1, 1, 2)),
    ("layers", (1, 2, 1), "layers and optim", (2, 1, 2)),
    ("layers and optim", (2, 2, 1), "layers", (1, 1, 1)),
    ("tied layers and optim", (1, 2, 2), "tied layers and optim", (1, 1, 1)),
    ("tied layers and optim", (1, 1, 1), "tied layers and optim", (1, 2, 1)),
    ("experts and optim", (1, 1, 2, 2), "experts", (1, 1, 1)),
    ("experts", (1, 1, 2, 2), "experts and optim", (2, 1, 2, 2)),
]


def made(pair: Pair, layout: Layout):
    tp, pp, _, *ep = layout
    initialize_model_parallel(tp, pp, *ep)
    torch.manual_seed(0)
    model = pair.model()
    if pp > 1:
        model = NxDPPModel(
            model, Layer, 1, input_names=["tokens", "labels"], auto_partition=True, broadcast_and_average_loss=True
        )
    named = model.local_named_parameters() if pp > 1 else model.named_parameters()
    trained = [(name, it) for name, it in named if it.requires_grad]
    groups = [
        {"params": [it for name, it in trained if "norm" not in name], "weight_decay": 0.1},
        {"params": [it for name, it in trained if "norm" in name], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if pair.zero1:
        return model, NeuronZero1Optimizer(groups, pair.optimizer, grad_clipping=False, lr=0.05)
    return model, pair.optimizer(groups, lr=0.05)


def train(model, optimizer, steps):
    """The loss of each step over the whole batch."""
    replicas, losses = active_group("dp"), []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(VOCAB, (2, BATCH), generator=generator)
        tokens, labels = rows[:, replicas.rank :: replicas.size]
        if isinstance(model, NxDPPModel):
            loss = model.run_train(tokens=tokens, labels=labels)
        else:
            loss = model(tokens, labels)
            loss.backward()
        if replicas.size > 1 and not isinstance(optimizer, NeuronZero1Optimizer):
            parameters = [it for group in optimizer.param_groups for it in group["params"]]
            GradientReducer(parameters).synchronize()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().double())
    total = torch.stack(losses)
    if replicas.size > 1:
        torch.distributed.all_reduce(total, group=replicas.process_group)
    return (total / replicas.size).tolist()


def train_and_save(pair, layout, folder):
    model, optimizer = made(pair, layout)
    before = train(model, optimizer, range(STEPS))
    nxd_ckpt.save(folder, "a", {"model": model, "optimizer": optimizer})
    return before + train(model, optimizer, range(STEPS, 2 * STEPS))


def load_and_train(pair, layout, folder):
    model, optimizer = made(pair, layout)
    with torch.no_grad():
        for it in model.local_parameters() if isinstance(model, NxDPPModel) else model.parameters():
            it.mul_(2)
    nxd_ckpt.load(folder, "a", into={"model": model, "optimizer": optimizer})
    return train(model, optimizer, range(STEPS, 2 * STEPS))


@pytest.fixture(scope="module")
def undisturbed():
    """The losses of one process, by what is trained."""
    from nxd_testing import run_on_ranks

    def losses(name):
        pair = PAIRS[name]

        def plain():
            model, optimizer = made(Pair(model=pair.model), (1, 1, 1))
            return train(model, optimizer, range(2 * STEPS))

        return run_on_ranks(plain, 1)[0]

    found = {}
    return lambda name: found.setdefault(name, losses(name)) if name not in found else found[name]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("saver", "saved", "loader", "loaded"), CASES)
def test_training_goes_on_at_another_layout_without_the_trainer(
    run_ranks, tmp_path, undisturbed, saver, saved, loader, loaded
):
    expected = undisturbed(saver)

    run = run_ranks(train_and_save, saved[0] * saved[1] * saved[2], PAIRS[saver], saved, tmp_path)
    resumed = run_ranks(load_and_train, loaded[0] * loaded[1] * loaded[2], PAIRS[loader], loaded, tmp_path)

    assert run[0] == pytest.approx(expected, rel=1e-10)
    for losses in resumed:
        assert losses == pytest.approx(expected[STEPS:], rel=1e-10)


def test_traced_model_takes_the_weights_that_a_training_has_saved_at_another_layout(run_ranks, tmp_path):
    run_ranks(train_and_save, 4, PAIRS["layers and optim"], (4, 1, 1), tmp_path / "run")
    tokens, labels = torch.randint(VOCAB, (2, BATCH), generator=torch.Generator().manual_seed(9))

    def loss_of_one_process():
        initialize_model_parallel(1)
        model = Model()
        nxd_ckpt.load(tmp_path / "run", into={"model": model}, strict=False)
        return model(tokens, labels).item()

    checkpoint = nxd_ckpt.open_checkpoint(tmp_path / "run")
    settings = {"tp_degree": 2, "compiler": "export", "progress": False, "inline_weights_to_neff": False}
    with parallel_model_trace(
        Model, (tokens, labels), weights=checkpoint.part("model"), cache_dir=tmp_path / "cache", **settings
    ) as traced:
        with pytest.raises(
            ValueError, match=r"embed.weight is missing, but model.embed.weight exists: .*part\('model'\)"
        ):
            traced.replace_weights(checkpoint)
        loss = traced(tokens, labels).item()

    with pytest.raises(ValueError, match="no tensors below 'weights'; its tensors are below model, optimizer"):
        checkpoint.part("weights")
    assert loss == pytest.approx(run_ranks(loss_of_one_process, 1)[0], rel=1e-10)
