"""Models that are cut into pipeline stages under transformers' Trainer, TRL's reward trainer and Accelerate."""

import pytest
import torch
from nxd_testing import RankFailure, run_on_ranks
from safetensors.torch import load_file

pytestmark = pytest.mark.sample(2)  # together they take a minute

LABELS = torch.arange(3, 51).view(3, 16)
NAMES = ["PP 2", "PP 2 with 3 microbatches", "PP 2 x TP 2", "PP 2 x DP 2 with ZeRO-3"]


def train(tools, folder, layout=None, resume=None, **arguments):
    """Train a Llama with dropout in its attention off; returns logs, and leaves the model in `folder/final`."""
    import numpy as np
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    def metrics(found):
        return {"likely": float(np.mean(found.predictions.argmax(-1) == found.label_ids))}

    with tools.at(layout):
        replicas = 1 if layout is None else layout.replicas
        settings = {"learning_rate": 1e-2, "optim": "sgd", "max_steps": 6, "logging_steps": 1, "save_steps": 3}
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "eval_strategy": "steps", "eval_steps": 3}
        sizes = {"per_device_train_batch_size": 4 // replicas, "per_device_eval_batch_size": 4 // replicas}
        trainer = Trainer(
            AutoModelForCausalLM.from_pretrained(folder / "model"),
            TrainingArguments(
                folder / "out",
                gradient_accumulation_steps=2,
                max_grad_norm=0.5,
                **{**settings, **quiet, **sizes, **arguments},
            ),
            train_dataset=tools.token_rows(20),
            eval_dataset=tools.token_rows(8, generator_seed=2),
            compute_metrics=metrics,
        )
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(folder / "final")
        kept = {"loss", "grad_norm", "eval_loss", "eval_likely", "learning_rate", "total_flos"}
        return [{key: float(log[key]) for key in log.keys() & kept} for log in trainer.state.log_history]


def weights(folder):
    return load_file(folder / "final/model.safetensors")


def assert_same_run(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


@pytest.fixture
def folders(tmp_path, tools):
    for name in ("one", "several"):
        tools.save_llama(tmp_path / name / "model")
    return tmp_path / "one", tmp_path / "several"


@pytest.mark.parametrize("name", NAMES)
def test_training_and_evaluation_are_those_of_one_process(name, folders, tools):
    (one, several), layout = folders, tools.layouts[name]
    [expected] = run_on_ranks(lambda: train(tools, one), 1)

    results = run_on_ranks(lambda: train(tools, several, layout), layout.ranks)

    for logs in results:
        assert_same_run(logs, expected)
    torch.testing.assert_close(weights(several), weights(one), rtol=1e-6, atol=1e-9)


def test_run_resumes_at_another_layout(folders, tools):
    (one, several), first, second = folders, tools.layouts["PP 2"], tools.layouts["TP 2"]
    [expected] = run_on_ranks(lambda: train(tools, one), 1)
    run_on_ranks(lambda: train(tools, several, first), first.ranks)

    logs, _ = run_on_ranks(lambda: train(tools, several, second, several / "out/checkpoint-3"), second.ranks)

    assert_same_run(logs, expected)
    torch.testing.assert_close(weights(several), weights(one), rtol=1e-6, atol=1e-9)


def test_dropout_of_both_passes_is_the_same(tmp_path, tools):
    """The second pass draws the first one's numbers: otherwise a step down the gradient would not lower the loss."""
    layout = tools.layouts["PP 2"]
    tools.save_llama(tmp_path / "model", attention_dropout=0.5)

    def losses():
        from accelerate import Accelerator
        from transformers import AutoModelForCausalLM

        with tools.at(layout):
            accelerator = Accelerator(cpu=True)
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").train()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            model, optimizer = accelerator.prepare(model, optimizer)
            batch = {"input_ids": torch.arange(32).view(2, 16), "labels": torch.arange(32).view(2, 16)}
            found = []
            for _ in range(2):
                torch.manual_seed(3)  # the same mask in both steps
                loss = model(**batch).loss
                accelerator.backward(loss)
                found.append((loss.item(), accelerator.clip_grad_norm_(model.parameters(), float("inf")).item()))
                optimizer.step()
                optimizer.zero_grad()
            return found

    (before, norm), (after, _) = run_on_ranks(losses, layout.ranks)[0]

    assert after - before == pytest.approx(-1e-4 * norm**2, rel=1e-2)


def test_both_passes_are_under_the_autocast_of_the_accelerator(tmp_path, tools):
    tools.save_llama(tmp_path, dtype=torch.float32)

    def dtypes():
        from accelerate import Accelerator
        from transformers import AutoModelForCausalLM

        with tools.at(tools.layouts["PP 2"]):
            accelerator = Accelerator(cpu=True, mixed_precision="bf16")
            model = AutoModelForCausalLM.from_pretrained(tmp_path)
            found = []
            for layer in model.model.layers:
                layer.mlp.down_proj.register_forward_hook(lambda module, args, output: found.append(output.dtype))
            model = accelerator.prepare(model)
            accelerator.backward(model(input_ids=LABELS[:2], labels=LABELS[:2]).loss)
            return found

    for found in run_on_ranks(dtypes, 2):
        assert found == [torch.bfloat16] * 4  # two microbatches in two passes


def test_backward_without_the_accelerator_trains_the_stages(tmp_path, tools):
    tools.save_llama(tmp_path / "model")

    def losses(layout):
        from accelerate import Accelerator
        from transformers import AutoModelForCausalLM

        with tools.at(layout):
            accelerator = Accelerator(cpu=True)
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            batch = {"input_ids": torch.arange(32).view(2, 16), "labels": torch.arange(32).view(2, 16)}
            found = []
            for _ in range(3):
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            return found

    [expected] = run_on_ranks(lambda: losses(None), 1)

    for found in run_on_ranks(lambda: losses(tools.layouts["PP 2"]), 2):
        assert found == pytest.approx(expected, rel=1e-6)


def steps(tools, folder, kind, layout=None, precision="no", **inputs):
    """Three steps of SGD on a model of any kind; returns losses and gradient norms."""
    import transformers
    from accelerate import Accelerator

    with tools.at(layout):
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        model = getattr(transformers, kind).from_pretrained(folder)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = {"input_ids": torch.arange(3, 51).view(3, 16), **inputs}
        found = []
        for _ in range(3):
            loss = model(**batch).loss
            accelerator.backward(loss)
            found += [loss.item(), float(accelerator.clip_grad_norm_(model.parameters(), 0.5))]
            optimizer.step()
            optimizer.zero_grad()
        return found


MODELS = {
    "loss of the routers": (
        "MixtralForCausalLM",
        {"output_router_logits": True, "router_aux_loss_coef": 0.5, "num_local_experts": 4, "dtype": torch.float32},
        {"labels": LABELS},
    ),
    "tied embeddings": ("LlamaForCausalLM", {"tie_word_embeddings": True}, {"labels": LABELS}),
    "logits with a cap": ("Gemma2ForCausalLM", {"final_logit_softcapping": 1.0}, {"labels": LABELS}),
    "classes of tokens": ("LlamaForTokenClassification", {"num_labels": 3}, {"labels": LABELS % 3}),
    "pooled states": (
        "BertForSequenceClassification",
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        {"labels": torch.tensor([0, 1, 1])},
    ),
    "decoder inside of the backbone": ("OPTForCausalLM", {"ffn_dim": 48, "dropout": 0.0}, {"labels": LABELS}),
    "answers": (
        "LlamaForQuestionAnswering",
        {},
        {"start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([4, 5, 6])},
    ),
}


@pytest.mark.parametrize("layout", ["PP 2", "PP 2 x TP 2"])
@pytest.mark.parametrize("name", MODELS)
def test_head_and_loss_of_any_model_are_its_own(name, layout, tmp_path, tools):
    kind, settings, inputs = MODELS[name]
    tools.save_model(tmp_path, kind, **settings)
    [expected] = run_on_ranks(lambda: steps(tools, tmp_path, kind, **inputs), 1)

    for found in run_on_ranks(
        lambda: steps(tools, tmp_path, kind, tools.layouts[layout], **inputs), tools.layouts[layout].ranks
    ):
        assert found == pytest.approx(expected, rel=1e-5 if "dtype" in settings else 1e-6)
    assert expected[-2] < expected[0]


def test_loss_of_the_routers_in_bfloat16_is_that_of_one_process(tmp_path, tools):
    kind, settings, inputs = MODELS["loss of the routers"]
    tools.save_model(tmp_path, kind, **settings)
    [expected] = run_on_ranks(lambda: steps(tools, tmp_path, kind, None, "bf16", **inputs), 1)

    for found in run_on_ranks(lambda: steps(tools, tmp_path, kind, tools.layouts["PP 2"], "bf16", **inputs), 2):
        assert found == pytest.approx(expected, rel=2e-2)


def test_ranks_keep_their_own_stages_only(tmp_path, tools):
    tools.save_llama(tmp_path)

    def sizes():
        from accelerate import Accelerator
        from transformers import AutoModelForCausalLM

        with tools.at(tools.layouts["PP 2"]):
            model = AutoModelForCausalLM.from_pretrained(tmp_path)
            whole = sum(it.nbytes for it in model.parameters())
            Accelerator(cpu=True).prepare(model)
            kept = {it.untyped_storage().data_ptr(): it.untyped_storage().nbytes() for it in model.parameters()}
            head = model.lm_head.weight.nbytes
            return sum(kept.values()) - head, whole - head

    for kept, whole in run_on_ranks(sizes, 2):
        assert kept < 0.6 * whole


def test_reward_model_is_trained_as_in_one_process(tmp_path, tools):
    tools.save_llama(tmp_path / "model", "LlamaForSequenceClassification", dtype=torch.float32)
    layout = tools.layouts["PP 2"]

    def reward(at):
        import trl
        from datasets import Dataset

        generator = torch.Generator().manual_seed(1)
        rows = [
            {
                column: tools.words(generator, length)
                for column, length in (("prompt", 3), ("chosen", 4), ("rejected", 5))
            }
            for _ in range(16)
        ]
        with tools.at(at):
            settings = {"learning_rate": 1e-2, "optim": "sgd", "max_steps": 3, "logging_steps": 1, "bf16": False}
            quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
            trainer = trl.RewardTrainer(
                f"{tmp_path}/model",
                args=trl.RewardConfig(f"{tmp_path}/out", per_device_train_batch_size=4, **settings, **quiet),
                train_dataset=Dataset.from_list(rows),
                processing_class=tools.make_tokenizer(),
            )
            trainer.train()
            kept = {"loss", "grad_norm", "margin"}
            return [{key: float(log[key]) for key in log.keys() & kept} for log in trainer.state.log_history]

    [expected] = run_on_ranks(lambda: reward(None), 1)

    for logs in run_on_ranks(lambda: reward(layout), layout.ranks):
        for mine, theirs in zip(logs, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_weights_are_streamed_from_the_prepared_model_only(tmp_path, tools):
    whole = tools.save_llama(tmp_path)

    def streamed():
        from accelerate import Accelerator
        from nxd_engine import stream_weights
        from transformers import LlamaConfig, LlamaForCausalLM

        with tools.at(tools.layouts["PP 2"]):
            made = LlamaForCausalLM(LlamaConfig.from_pretrained(whole, architectures=None)).double()
            made.load_state_dict(LlamaForCausalLM.from_pretrained(whole).state_dict())
            model = Accelerator(cpu=True).prepare(made)
            found = dict(stream_weights(model))
            with pytest.raises((ValueError, RuntimeError), match=r"cut into pipeline stages.*trainer\.model_wrapped"):
                list(stream_weights(made))
            return found

    found, nothing = run_on_ranks(streamed, 2)

    assert nothing == {}
    torch.testing.assert_close(found, load_file(tmp_path / "model.safetensors"), rtol=0, atol=0)


def test_adapters_of_peft_are_not_streamed(tmp_path, tools):
    tools.save_llama(tmp_path)

    def stream():
        from accelerate import Accelerator
        from nxd_engine import stream_weights
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        with tools.at(tools.layouts["PP 2"]):
            adapted = get_peft_model(
                AutoModelForCausalLM.from_pretrained(tmp_path), LoraConfig(target_modules=["q_proj"])
            )
            list(stream_weights(Accelerator(cpu=True).prepare(adapted)))

    with pytest.raises(RankFailure, match="the model has PEFT's adapters, which are not merged here"):
        run_on_ranks(stream, 2)


def test_each_backward_of_a_loss_counts_and_a_frozen_model_answers_with_gradients_enabled(tmp_path, tools):
    """Two backwards through one forward, one each and both at once; the other model is a frozen reference."""
    tools.save_llama(tmp_path / "model")
    batch = {"input_ids": torch.arange(3, 35).view(2, 16), "labels": torch.arange(3, 35).view(2, 16)}

    def norms(layout):
        from accelerate import Accelerator
        from transformers import AutoModelForCausalLM

        with tools.at(layout):
            accelerator = Accelerator(cpu=True)
            reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model").requires_grad_(False)
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = accelerator.prepare(model, optimizer)
            if layout is not None:  # DistributedDataParallel refuses a frozen model
                reference = accelerator.prepare(reference)
            found = []
            for at_once in (False, True):
                output = model(**batch)
                backward = torch.Tensor.backward if at_once else accelerator.backward
                backward((output.logits - reference(**batch).logits + 1).square().mean(), retain_graph=True)
                accelerator.backward(output.loss)
                found.append(accelerator.clip_grad_norm_(model.parameters(), float("inf")).item())
                optimizer.step()
                optimizer.zero_grad()
            return found

    [expected] = run_on_ranks(lambda: norms(None), 1)

    for found in run_on_ranks(lambda: norms(tools.layouts["PP 2"]), 2):
        assert found == pytest.approx(expected, rel=1e-6)


def test_forward_whose_loss_is_dropped_is_freed(tmp_path, tools):
    tools.save_llama(tmp_path / "model")

    def count_tensors():
        import gc

        from accelerate import Accelerator
        from transformers import AutoModelForCausalLM

        with tools.at(tools.layouts["PP 2"]):
            model = Accelerator(cpu=True).prepare(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
            counts = []
            for _ in range(16):
                model(input_ids=torch.arange(32).view(2, 16), labels=torch.arange(32).view(2, 16))
                gc.collect()
                counts.append(sum(isinstance(it, torch.Tensor) for it in gc.get_objects()))
            return counts

    for counts in run_on_ranks(count_tensors, 2):
        assert counts[-1] == counts[11]  # buffers of messages are kept, up to a number


def test_backbone_that_the_script_calls_itself_is_that_of_the_stages(tmp_path, tools):
    tools.save_llama(tmp_path)

    def norms(layout):
        from accelerate import Accelerator
        from transformers import AutoModelForCausalLM

        with tools.at(layout):
            accelerator = Accelerator(cpu=True)
            model = AutoModelForCausalLM.from_pretrained(tmp_path)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = accelerator.prepare(model, optimizer)
            inner, found = accelerator.unwrap_model(model), []
            for _ in range(2):
                hidden = inner.model(LABELS).last_hidden_state
                accelerator.backward(inner.lm_head(hidden).square().mean())
                found.append(float(accelerator.clip_grad_norm_(model.parameters(), float("inf"))))
                optimizer.step()
                optimizer.zero_grad()
            return found

    [expected] = run_on_ranks(lambda: norms(None), 1)

    for found in run_on_ranks(lambda: norms(tools.layouts["PP 2"]), 2):
        assert found == pytest.approx(expected, rel=1e-6)


def prepared_and_used(tools, folder, use):
    """Prepare a Llama at PP 2 and use it with its accelerator and optimizer; returns what `use` returns."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    with tools.at(tools.layouts["PP 2"]):
        accelerator = Accelerator(cpu=True)
        model = AutoModelForCausalLM.from_pretrained(folder)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return use(accelerator, model, optimizer)


REFUSED = {
    "outputs of single layers": (
        lambda accelerator, model: model(input_ids=LABELS, output_hidden_states=True),
        "LlamaForCausalLM is cut into pipeline stages, which keep no output_hidden_states",
    ),
    "a layer of another rank": (
        lambda accelerator, model: [
            it.mlp(torch.ones(1, 2, 32).double()) for it in inner(accelerator, model).model.layers
        ],
        "is on another rank of the pipeline; call the model or its backbone",
    ),
    "a loss of the head alone": (
        lambda accelerator, model: accelerator.backward(inner(accelerator, model).lm_head.weight.sum()),
        "the loss depends on the head of LlamaForCausalLM and not on its backbone",
    ),
    "embeddings with gradients": (
        lambda accelerator, model: model(inputs_embeds=torch.ones(2, 4, 32).double().requires_grad_()),
        "an input of LlamaForCausalLM requires gradients",
    ),
}


def inner(accelerator, model):
    return accelerator.unwrap_model(model)


@pytest.mark.parametrize("name", REFUSED)
def test_what_stages_cannot_do_is_refused(name, tmp_path, tools):
    tools.save_llama(tmp_path)
    use, reason = REFUSED[name]

    with pytest.raises(RankFailure, match=reason):
        run_on_ranks(
            lambda: prepared_and_used(tools, tmp_path, lambda accelerator, model, _: use(accelerator, model)), 2
        )


def test_zero_grad_forgets_backwards_that_no_step_has_used(tmp_path, tools):
    tools.save_llama(tmp_path)

    def norms(accelerator, model, optimizer):
        found = []
        for forgotten in (False, True):
            if forgotten:
                model(input_ids=LABELS, labels=LABELS).loss.backward()
                optimizer.zero_grad()
            accelerator.backward(model(input_ids=LABELS, labels=LABELS).loss)
            found.append(float(accelerator.clip_grad_norm_(model.parameters(), float("inf"))))
            optimizer.zero_grad()
        return found

    for first, second in run_on_ranks(lambda: prepared_and_used(tools, tmp_path, norms), 2):
        assert first == pytest.approx(second, rel=1e-9)
