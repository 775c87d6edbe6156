"""Of a model that is cut, a rank keeps its own stages in memory, and the rest is freed at once with the model."""

import gc
import weakref

import pytest
from nxd_pipeline import NxDPPModel
from nxd_state import initialize_model_parallel
from torch import fx, nn

fx.wrap("twice")


def twice(hidden):
    return 2 * hidden


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, hidden):
        for layer in self.layers:
            hidden = twice(layer(hidden))
        return hidden


def layers_that_stay() -> list[bool]:
    initialize_model_parallel(1, 2)
    model = Model()
    weights = [weakref.ref(layer.weight) for layer in model.layers]
    gc.disable()
    try:
        pipeline = NxDPPModel(model, nn.Linear, 2, auto_partition=True, input_names=["hidden"])
        assert isinstance(pipeline, NxDPPModel)
        del model
        return [weight() is not None for weight in weights]
    finally:
        gc.enable()


def test_layers_of_other_ranks_go_with_the_model_without_waiting_for_the_garbage_collector(run_ranks):
    assert run_ranks(layers_that_stay, 2) == [[True, True, False, False], [False, False, True, True]]


def weights_of_transformers_that_stay() -> list[str]:
    import transformers

    initialize_model_parallel(1, 2)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, num_hidden_layers=2, **sizes))
    weights = {name: weakref.ref(it) for name, it in model.named_parameters()}
    pipeline = NxDPPModel(model, num_microbatches=2, auto_partition=True)
    own = {name for name, _ in pipeline.local_named_parameters()}
    del model
    gc.collect()  # the model has cycles of its own
    return [name for name, weight in weights.items() if weight() is not None and name not in own]


def test_weights_of_other_ranks_of_a_model_of_transformers_go_with_the_model(run_ranks):
    pytest.importorskip("transformers", reason="its models are cut by their structure: pip install transformers")

    assert run_ranks(weights_of_transformers_that_stay, 2) == [[], []]
