"""Adapters of subclasses of plain layers: where the forward does more, the branch has that done to it as well."""

import pytest
import torch
from nxd_layers import ColumnParallelLinear, ParallelEmbedding
from nxd_layers.activation_checkpoint import apply_activation_checkpointing
from nxd_layers.hf import parallelize
from nxd_lora import LoraConfig, LoraModel, gather_adapter, load_adapter
from torch import nn

IDS = torch.tensor([[1, 5, 0], [7, 5, 2]])


class Scaled(nn.Embedding):
    embed_scale = 3.0

    def forward(self, input_ids):
        return super().forward(input_ids) * self.embed_scale


class Divided(Scaled):
    def forward(self, input_ids):
        return super().forward(input_ids) / self.embed_scale


class Normed(nn.Embedding):
    def forward(self, ids):
        return nn.functional.layer_norm(super().forward(ids), [self.embedding_dim])


class Shifted(nn.Embedding):
    def forward(self, ids, offset=1):
        return super().forward(ids + offset)


class ScaledLinear(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) * 0.5, hidden


class ScaledConv(nn.Conv2d):
    def forward(self, image):
        return super().forward(image) * 0.5


class Model(nn.Module):
    def __init__(self, table):
        super().__init__()
        torch.manual_seed(0)
        self.table = table(9, 4, dtype=torch.float64)
        self.table.weight.data.normal_(generator=torch.Generator().manual_seed(0))
        self.proj = ScaledLinear(4, 4, dtype=torch.float64)
        self.conv = ScaledConv(1, 2, 3, padding=1, dtype=torch.float64)

    def forward(self):
        hidden, kept = self.proj(self.table(IDS))
        return (self.conv((hidden + kept).unsqueeze(1)).tanh()).square().sum()


def loss_and_grads(table):
    model = parallelize(Model(table), plan={"table": "embedding_rowwise"})
    model = LoraModel(model, LoraConfig(lora_rank=2, target_modules=["table", "proj", "conv"]))
    generator = torch.Generator().manual_seed(1)
    shapes = sorted(gather_adapter(model).items())
    load_adapter(model, {name: torch.randn(it.shape, generator=generator, dtype=it.dtype) * 0.2 for name, it in shapes})
    loss = model()
    loss.backward()
    for parameter in model.adapter_parameters().values():
        parameter.data = parameter.grad
    grads = {name: it.clone() for name, it in gather_adapter(model).items()}
    load_adapter(model, {name: torch.randn(it.shape, generator=generator, dtype=it.dtype) * 0.2 for name, it in shapes})
    unmerged = model().item()
    model.merge()
    assert model().item() == pytest.approx(unmerged, rel=1e-12)
    return loss.item(), grads


@pytest.mark.parametrize("table", [nn.Embedding, Scaled, Divided, Normed, Shifted])
def test_branch_of_a_subclass_equals_the_merged_weight_at_any_layout(on_tp, assert_same, table):
    loss, grads = on_tp(1, lambda: loss_and_grads(table))[0]

    for found, its_grads in on_tp(2, lambda: loss_and_grads(table)):
        assert found == pytest.approx(loss, rel=1e-12)
        for name, grad in its_grads.items():
            assert_same(grad, grads[name])


class OwnColumn(ColumnParallelLinear):
    def forward(self, input_):
        return super().forward(input_) * 2


@pytest.mark.parametrize(
    ("layer", "settings", "message"),
    [
        (lambda: OwnColumn(4, 4), {}, "names 0, a OwnColumn, whose forward does more"),
        (lambda: ScaledLinear(4, 4), {"lora_dropout": 0.1}, r"set lora_dropout=0\.1 to 0"),
        (lambda: ScaledLinear(4, 4), {"use_dora": True}, "use_dora=True does not support ScaledLinear"),
        (lambda: nn.Embedding(4, 4, max_norm=1.0), {}, "max_norm"),
        (lambda: ParallelEmbedding(4, 4, collect_output=False), {}, "collect_output=False"),
    ],
)
def test_subclass_or_option_that_an_adapter_would_miss_is_refused(layer, settings, message):
    with pytest.raises(ValueError, match=message):
        LoraModel(nn.Sequential(layer()), LoraConfig(target_modules=["0"], **settings))


def test_checkpointed_subclass_is_refused_and_a_checkpointed_plain_layer_is_not():
    for layer, is_refused in ((nn.Linear(2, 2), False), (ScaledLinear(2, 2), True)):
        model = nn.Sequential(layer)
        apply_activation_checkpointing(model, nn.Linear)
        if is_refused:
            with pytest.raises(ValueError, match="recomputation would ignore the adapter"):
                LoraModel(model, LoraConfig(target_modules=["0"]))
        else:
            LoraModel(model, LoraConfig(target_modules=["0"]))


def test_list_of_which_a_name_also_means_what_cannot_be_adapted_is_refused():
    model = nn.ModuleDict(
        {"a": nn.ModuleDict({"proj": nn.Linear(2, 2)}), "b": nn.ModuleDict({"proj": nn.Conv3d(2, 2, 1)})}
    )

    with pytest.raises(ValueError, match=r"also names b\.proj \(Conv3d\), which LoRA cannot adapt"):
        LoraModel(model, LoraConfig(target_modules=["proj"]))
    LoraModel(model, LoraConfig(target_modules=["a.proj"]))
