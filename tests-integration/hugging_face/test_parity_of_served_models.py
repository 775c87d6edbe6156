"""`nxd parity --served`: a model as it is served, on two workers, against its plain forward."""

import pytest
import torch

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of a small Qwen3."""
    path = tmp_path_factory.mktemp("qwen3")
    config = transformers.Qwen3Config(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def test_served_model_gives_tokens_the_probabilities_of_its_plain_forward(folder):
    from nxd_trainer.parity.served import compare_served

    report = compare_served(folder, tp_degree=2, compiler="export")

    assert report.agrees, report
    assert (report.steps, report.ranks) == (8, 2)
    assert "the log-probabilities of the 300 most likely tokens" in str(report)


def test_plain_forward_that_differs_from_the_served_model_is_found(folder, monkeypatch):
    from nxd_trainer.parity import served

    def with_another_norm(opened):
        model = loaded(opened)
        with torch.no_grad():
            model.model.norm.weight[3] *= 1.1
        return model

    loaded = served.load_opened
    monkeypatch.setattr(served, "load_opened", with_another_norm)

    found = served.compare_served(folder, compiler="export").first

    assert (found.step, found.kind, found.name) == (1, "activation", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe.toml"], "--served compares a model that there is; leave recipe.toml out"),
        (["train.steps=3"], "leave train.steps=3 out"),
        (["--nproc", "0"], "--nproc 0 must be 1 or more"),
        ([], "nowhere"),
    ],
)
def test_served_model_that_cannot_be_compared_is_a_mistake(capsys, arguments, message):
    from nxd_cli import main

    assert main(["parity", "--served", "nowhere", *arguments]) == 2

    assert message in capsys.readouterr().err
