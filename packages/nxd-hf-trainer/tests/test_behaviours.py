"""What scripts rely on in transformers' Trainer: at a layout it is as in plain processes."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from nxd_testing import run_on_ranks

pytestmark = pytest.mark.sample(2)  # together they take a minute

QUIET = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
LOGGED = {"loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss", "train_loss", "eval_share", "test_share"}


def train(tools, folder, layout, build, **options):
    """Let `build` make a trainer and use it; returns the logs, what `build` returned, and the trained weights."""
    import transformers

    with tools.at(layout):
        replicas = layout.replicas

        def arguments(kind="TrainingArguments", **settings):
            sizes = {f"per_device_{of}_batch_size": 4 // replicas for of in ("train", "eval")}
            own = {"learning_rate": 1e-2, "optim": "sgd", "max_steps": 4, "logging_steps": 1, "seed": 3}
            settings = {**own, **QUIET, **sizes, **options, **settings}
            return getattr(transformers, kind)(f"{folder}/out", **settings)

        made = SimpleNamespace(**vars(tools), folder=folder, arguments=arguments, hf=transformers)
        return build(made)


def logs_of(trainer):
    return [{key: float(log[key]) for key in log.keys() & LOGGED} for log in trainer.state.log_history]


def results(trainer, folder, *extra):
    """Return logs, further numbers, and the weights of the folder that `save_model` writes."""
    from safetensors.torch import load_file

    trainer.save_model(f"{folder}/final")
    trainer.accelerator.wait_for_everyone()
    return logs_of(trainer), [float(it) for it in extra], load_file(f"{folder}/final/model.safetensors")


def llama(its, **settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return its.hf.LlamaForCausalLM(its.hf.LlamaConfig(**sizes, **heads, pad_token_id=0, eos_token_id=1, **settings))


def rows_of_lengths(its, count=16):
    """Rows of different lengths, for a collator that pads them."""
    rows = its.token_rows(count)
    return [{"input_ids": row["input_ids"][: 6 + number % 9].tolist()} for number, row in enumerate(rows)]


def plain_training(its, rows=20, model=None, kind="Trainer", **arguments):
    more = arguments.pop("trainer", {})
    made = getattr(its.hf, kind) if isinstance(kind, str) else kind
    data = {"train_dataset": its.token_rows(rows), "eval_dataset": its.token_rows(8, generator_seed=2)}
    return made(llama(its) if model is None else model or None, its.arguments(**arguments), **{**data, **more})


def settings(**arguments):
    """Return a case in which only arguments of TrainingArguments matter."""

    def build(its):
        trainer = plain_training(its, **arguments)
        trainer.train()
        return results(trainer, its.folder)

    return build


def grouped_by_length(its):
    collator = its.hf.DataCollatorForLanguageModeling(its.make_tokenizer(), mlm=False)
    data = {"train_dataset": rows_of_lengths(its), "data_collator": collator}
    trainer = plain_training(its, trainer=data, train_sampling_strategy="group_by_length")
    trainer.train()
    return results(trainer, its.folder)


def nan_is_filtered(its):
    class Sometimes(its.hf.Trainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss + float("nan") if self.state.global_step == 1 else loss  # gradients stay finite

    trainer = plain_training(its, kind=Sometimes)
    trainer.train()
    return results(trainer, its.folder)


def callback_stops(its):
    class Stop(its.hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    trainer = plain_training(its, trainer={"callbacks": [Stop()]})
    trainer.train()
    return results(trainer, its.folder, trainer.state.global_step)


def early_stopping(its):
    evaluating = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 1}
    callbacks = {"callbacks": [its.hf.EarlyStoppingCallback(early_stopping_patience=1)]}
    trainer = plain_training(its, trainer=callbacks, **evaluating, **best, max_steps=8, learning_rate=4.0)
    trainer.train()
    assert trainer.state.global_step < 8
    return results(trainer, its.folder, trainer.state.global_step)


def metrics(its):
    def share(prediction):
        right, counted = prediction.predictions[:, :-1] == prediction.label_ids[:, 1:], prediction.label_ids[:, 1:] >= 0
        return {"share": (right & counted).sum() / counted.sum()}

    functions = {
        "compute_metrics": share,
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    }
    trainer = plain_training(its, trainer=functions, eval_strategy="steps", eval_steps=2, learning_rate=0.5)
    before = trainer.evaluate()["eval_loss"]  # before `train`: each rank has the whole model
    trainer.train()
    predicted = trainer.predict(its.token_rows(7, generator_seed=4))
    assert predicted.predictions.shape == (7, 16)
    return results(trainer, its.folder, before, predicted.metrics["test_share"], predicted.predictions.sum())


def generation(its):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = its.hf.T5ForConditionalGeneration(
        its.hf.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    )
    rows = [dict(row, labels=row["input_ids"][:8]) for row in its.token_rows(8)]
    data = {"train_dataset": rows, "eval_dataset": rows, "compute_metrics": lambda it: {"share": it.predictions.mean()}}
    generating = {"predict_with_generate": True, "generation_max_length": 8, "eval_strategy": "steps", "eval_steps": 2}
    arguments = its.arguments("Seq2SeqTrainingArguments", **generating, learning_rate=0.3)
    trainer = its.hf.Seq2SeqTrainer(model, arguments, **data)
    trainer.train()
    predicted = trainer.predict(rows, max_length=10)
    return results(trainer, its.folder, predicted.predictions.sum(), predicted.predictions.shape[1])


def trained_twice(its):
    trainer = plain_training(its, max_steps=3)
    trainer.train()
    first = trainer.state.log_history[-1]["train_loss"]
    trainer.args.max_steps = 2
    trainer.train()
    return results(trainer, its.folder, first)


def given_optimizer(its):
    model = llama(its)
    norms = [it for name, it in model.named_parameters() if "norm" in name]
    others = [it for name, it in model.named_parameters() if "norm" not in name]
    groups = [{"params": others, "lr": 0.1, "momentum": 0.9}, {"params": norms, "lr": 0.01}]
    optimizer = torch.optim.SGD(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    trainer = plain_training(its, model=model, trainer={"optimizers": (optimizer, scheduler)})
    trainer.train()
    return results(trainer, its.folder)


def model_from_init(its):
    trainer = plain_training(its, trainer={"model_init": lambda: llama(its)}, model=False)
    trainer.train()
    trainer.train()
    return results(trainer, its.folder)


def own_loss(its):
    class Weighted(its.hf.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            losses = torch.nn.functional.cross_entropy(
                outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten().clamp(min=0), reduction="none"
            )
            loss = (losses * torch.linspace(0.5, 1.5, len(losses))).mean()
            return (loss, outputs) if return_outputs else loss

    trainer = plain_training(its, kind=Weighted, gradient_accumulation_steps=1)
    trainer.train()
    return results(trainer, its.folder)


def sequence_classification(its):
    torch.manual_seed(0)
    config = llama(its).config
    config.num_labels = 3
    return classified(its, its.hf.LlamaForSequenceClassification(config))


def bert_classification(its, **arguments):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = its.hf.BertConfig(**sizes, **dropout, num_attention_heads=4, max_position_embeddings=64, num_labels=3)
    return classified(its, its.hf.BertForSequenceClassification(config), **arguments)


def bert_classification_not_scaled(its):
    return bert_classification(its, average_tokens_across_devices=False)


def classified(its, model, **arguments):
    rows = [{"input_ids": row["input_ids"], "labels": number % 3} for number, row in enumerate(its.token_rows(16))]
    share = {"compute_metrics": lambda it: {"share": (it.predictions.argmax(-1) == it.label_ids).mean()}}
    data = {"train_dataset": rows, "eval_dataset": rows, **share}
    trainer = plain_training(its, model=model, trainer=data, eval_strategy="steps", eval_steps=2, **arguments)
    trainer.train()
    return results(trainer, its.folder)


CASES = {
    "epochs": settings(num_train_epochs=1.5, max_steps=-1, rows=12),
    "steps over several epochs": settings(max_steps=5, rows=8),
    "last batch dropped": settings(num_train_epochs=2, max_steps=-1, dataloader_drop_last=True, rows=10),
    "accumulation that epochs cut": settings(
        num_train_epochs=2, max_steps=-1, gradient_accumulation_steps=2, logging_steps=2, rows=12
    ),
    "rows grouped by length": grouped_by_length,
    "last batch uneven": settings(num_train_epochs=2, max_steps=-1, rows=11),
    "label smoothing": settings(label_smoothing_factor=0.1),
    "NaN losses filtered": nan_is_filtered,
    "no clipping": settings(max_grad_norm=0.0),
    "warm-up and cosine": settings(warmup_steps=2, lr_scheduler_type="cosine", weight_decay=0.1),
    "a callback stops": callback_stops,
    "early stopping": early_stopping,
    "metrics and predict": metrics,
    "generation in evaluation": generation,
    "gradient checkpointing": settings(gradient_checkpointing=True),
    "trained twice": trained_twice,
    "optimizer given": given_optimizer,
    "model_init": model_from_init,
    "loss of a subclass": own_loss,
    "Llama classification": sequence_classification,
    "BERT classification": bert_classification,
    "BERT classification, loss not scaled": bert_classification_not_scaled,
}


LAYOUTS = ["TP 2", "PP 2", "DP 2 with ZeRO-1", "DP 2 with ZeRO-3"]
ENCODER_DECODER = "generation in evaluation"  # by a T5, which has no stages

# The first: plain DistributedDataParallel does not sum gradients if `evaluate` was called before `train`; we do.
AS_ONE_PROCESS = {"metrics and predict", "BERT classification, loss not scaled"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Plain processes: what a case returns, run once for each number of processes, by DistributedDataParallel if 2."""
    known = {}

    def run(name, tools, processes):
        if (name, processes) not in known:
            folder = tmp_path_factory.mktemp("plain")
            replicas = SimpleNamespace(replicas=processes, degrees=None)
            environment = {"ACCELERATE_USE_CPU": "true"}
            found = run_on_ranks(lambda: train(tools, folder, replicas, CASES[name]), processes, env=environment)
            known[name, processes] = found[0]
        return known[name, processes]

    return run


def assert_same(found, expected, **tolerance):
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine == pytest.approx(theirs, **tolerance, nan_ok=True)
    assert found[1] == pytest.approx(expected[1], **tolerance)
    torch.testing.assert_close(found[2], expected[2], rtol=tolerance["rel"], atol=tolerance["abs"])


@pytest.mark.parametrize(("case", "name"), [it for it in product(CASES, LAYOUTS) if it != (ENCODER_DECODER, "PP 2")])
def test_behaviour_at_a_layout_is_that_of_as_many_plain_processes_as_replicas(case, name, plain, tmp_path, tools):
    layout, build = tools.layouts[name], CASES[case]
    expected = plain(case, tools, 1 if case in AS_ONE_PROCESS else layout.replicas)

    found = run_on_ranks(lambda: train(tools, tmp_path, layout, build), layout.ranks)

    for its in found:
        assert_same(its, expected, rel=2e-5, abs=2e-6)
