"""Scripts that call an Accelerator themselves."""

import pytest
import torch
from nxd_testing import RankFailure, run_on_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification


def loop(tools, folder, layout=None, accumulation=2):
    """A loop as Accelerate's documentation writes it; returns losses, norms and learning rates."""
    from accelerate import Accelerator
    from transformers import get_linear_schedule_with_warmup

    with tools.at(layout):
        replicas = 1 if layout is None else layout.replicas
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_pretrained(folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = get_linear_schedule_with_warmup(optimizer, 2 * replicas, 12 * replicas)
        loader = torch.utils.data.DataLoader(tools.token_rows(24), batch_size=4 // replicas)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        found = []
        for batch in loader:
            with accelerator.accumulate(model):
                labels = (batch["labels"][:, 1:] != -100).sum()
                loss = model(**batch, num_items_in_batch=accelerator.gather(labels).sum()).loss * replicas
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if accelerator.sync_gradients else 0.0
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found.append((float(accelerator.gather(loss.detach()).mean()), float(norm)))
        tensors = accelerator.get_state_dict(model)
        accelerator.unwrap_model(model).save_pretrained(
            f"{folder}/{'plain' if layout is None else 'split'}",
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=dict(tensors),  # transformers takes them out of it
        )
        return found, tensors


@pytest.mark.parametrize("name", ["TP 2", "DP 2 with ZeRO-3"])
def test_loop_with_an_accelerator_is_that_of_one_process(name, tmp_path, tools):
    folder, layout = tools.save_llama(tmp_path), tools.layouts[name]
    [(expected, trained)] = run_on_ranks(lambda: loop(tools, folder), 1)

    results = run_on_ranks(lambda: loop(tools, folder, layout), layout.ranks)

    for found, _ in results:
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)
    (_, whole), (_, nothing) = results
    torch.testing.assert_close(whole, dict(trained), rtol=0, atol=1e-5)
    assert nothing == {}
    plain, split = (AutoModelForCausalLM.from_pretrained(f"{folder}/{name}") for name in ("plain", "split"))
    assert plain.config.to_diff_dict() == split.config.to_diff_dict()
    torch.testing.assert_close(dict(split.state_dict()), dict(plain.state_dict()), rtol=0, atol=1e-5)


def test_ranks_of_a_replica_with_different_batches_are_refused(tmp_path, tools):
    folder, layout = tools.save_llama(tmp_path), tools.layouts["TP 2"]

    def call():
        import os

        from accelerate import Accelerator

        with tools.at(layout):
            model = Accelerator(cpu=True).prepare(AutoModelForCausalLM.from_pretrained(folder))
            model(input_ids=torch.full((2, 4), int(os.environ["RANK"])), attention_mask=torch.ones(2, 4))

    with pytest.raises(RankFailure, match="different batches: input_ids differ") as caught:
        run_on_ranks(call, layout.ranks)
    assert len(caught.value.failures) == layout.ranks


def resumable_loop(tools, folder, layout, save_at=None, resume=False):
    """Six steps of a loop that saves its state as Accelerate's examples do, or goes on from it; returns its losses."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration
    from transformers import get_linear_schedule_with_warmup

    with tools.at(layout):
        replicas = 1 if layout is None else layout.replicas
        naming = ProjectConfiguration(project_dir=f"{folder}/project", automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=naming)
        model = AutoModelForCausalLM.from_pretrained(folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = get_linear_schedule_with_warmup(optimizer, 2 * replicas, 12 * replicas)
        loader = torch.utils.data.DataLoader(tools.token_rows(24), batch_size=4 // replicas)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        found, start = [], 0
        if resume:
            accelerator.load_state()
            start = 3
        for number, batch in enumerate(accelerator.skip_first_batches(loader, start), start):
            if number == save_at:
                accelerator.save_state()
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            found.append((float(accelerator.gather(loss.detach()).mean()), scheduler.get_last_lr()[0]))
        return found


@pytest.mark.parametrize(("first", "second"), [("TP 2", "PP 2"), ("TP 2 x DP 2 with ZeRO-1", "DP 2 with ZeRO-3")])
def test_state_of_an_accelerator_is_loaded_at_another_layout(first, second, tmp_path, tools):
    tools.save_llama(tmp_path)
    before, after = tools.layouts[first], tools.layouts[second]
    expected, *_ = run_on_ranks(lambda: resumable_loop(tools, tmp_path, before, save_at=3), before.ranks)

    for found in run_on_ranks(lambda: resumable_loop(tools, tmp_path, after, resume=True), after.ranks):
        for mine, theirs in zip(found, expected[3:], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)


def test_state_that_was_saved_without_a_layout_is_refused(tmp_path, tools):
    tools.save_llama(tmp_path)
    run_on_ranks(lambda: resumable_loop(tools, tmp_path, None, save_at=3), 1)

    with pytest.raises(RankFailure, match="checkpoint_0 lacks states of prepared models in nxd/"):
        run_on_ranks(lambda: resumable_loop(tools, tmp_path, tools.layouts["TP 2"], resume=True), 2)


@pytest.mark.parametrize("name", ["TP 2", "PP 2", "DP 2 with ZeRO-3"])
def test_models_that_the_script_drops_are_freed(name, tmp_path, tools):
    folder, layout = tools.save_llama(tmp_path), tools.layouts[name]

    def prepare_three():
        import gc
        import weakref

        from accelerate import Accelerator

        def step(accelerator, model, optimizer, rate):
            ids = torch.arange(3, 35).view(2, 16)
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e-3)
            before = accelerator.get_state_dict(model)
            optimizer.step()
            after = accelerator.get_state_dict(model)
            return float(norm), sum(float((after[it] - before[it]).norm()) ** 2 for it in after) ** 0.5 / rate

        with tools.at(layout):
            accelerator = Accelerator(cpu=True)

            def prepared(rate):
                model = AutoModelForCausalLM.from_pretrained(folder)
                return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))

            first, second = prepared(0.1), prepared(0.2)
            dropped = weakref.ref(first[0])
            accelerator.free_memory()
            del first
            gc.collect()
            third = prepared(0.4)
            return dropped() is None, step(accelerator, *second, 0.2), step(accelerator, *third, 0.4)

    for is_freed, of_second, of_third in run_on_ranks(prepare_three, layout.ranks):
        assert is_freed
        assert of_second[0] > 1e-2
        assert of_second == pytest.approx(of_third, rel=1e-6)
        assert of_second[1] < 1.01e-3  # clipped by its own gradients


def test_split_model_is_not_saved_without_whole_tensors(tmp_path, tools):
    folder, layout = tools.save_llama(tmp_path), tools.layouts["TP 2"]

    def save():
        from accelerate import Accelerator

        with tools.at(layout):
            accelerator = Accelerator(cpu=True)
            model = accelerator.prepare(AutoModelForCausalLM.from_pretrained(folder))
            accelerator.unwrap_model(model).save_pretrained(tmp_path / "saved")

    with pytest.raises(RankFailure, match=r"pass is_main_process=accelerator.is_main_process"):
        run_on_ranks(save, layout.ranks)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["TP 2", "PP 2", "DP 2 with ZeRO-3"])
@pytest.mark.parametrize("adapters", [False, True], ids=["model", "adapters"])
def test_save_pretrained_by_all_ranks_writes_what_one_process_does(adapters, name, tmp_path, tools):
    folder, layout = tools.save_llama(tmp_path / "model", "LlamaForSequenceClassification"), tools.layouts[name]

    def save(layout=None):
        from accelerate import Accelerator
        from peft import LoraConfig, get_peft_model

        with tools.at(layout):
            accelerator = Accelerator(cpu=True)
            model = AutoModelForSequenceClassification.from_pretrained(folder)
            if adapters:
                torch.manual_seed(9)
                settings = {"target_modules": ["q_proj", "o_proj"], "modules_to_save": ["score"]}
                model = get_peft_model(model, LoraConfig(init_lora_weights=False, **settings))
            accelerator.unwrap_model(accelerator.prepare(model)).save_pretrained(
                tmp_path / ("plain" if layout is None else "split"),
                is_main_process=accelerator.is_main_process,
                save_function=accelerator.save,
            )

    run_on_ranks(save, 1)
    run_on_ranks(lambda: save(layout), layout.ranks)

    file = "adapter_model.safetensors" if adapters else "model.safetensors"
    expected, found = (load_file(tmp_path / it / file) for it in ("plain", "split"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[it], expected[it]) for it in expected)


def test_main_process_is_one_rank_and_all_wait_for_it(tmp_path, tools):
    layout = tools.layouts["TP 2 x DP 2 with ZeRO-1"]

    def main_process_writes():
        from accelerate import Accelerator

        with tools.at(layout):
            accelerator = Accelerator(cpu=True)
            with accelerator.main_process_first():
                seen = (tmp_path / "written").exists()
                if accelerator.is_main_process:
                    (tmp_path / "written").touch()
            return seen, accelerator.process_index, accelerator.num_processes

    found = run_on_ranks(main_process_writes, layout.ranks)

    assert [seen for seen, _, _ in found] == [False, True, True, True]
    assert [(index, count) for _, index, count in found] == [(0, 2), (0, 2), (1, 2), (1, 2)]


def refused(tools, layout, act):
    def run():
        from accelerate import Accelerator

        with tools.at(layout):
            act(Accelerator(cpu=True))

    with pytest.raises(RankFailure) as caught:
        run_on_ranks(run, layout.ranks)
    assert len(caught.value.failures) == layout.ranks  # every rank raises
    return str(caught.value)


def test_module_that_has_no_plan_is_refused_with_the_way_that_works(tools):
    message = refused(tools, tools.layouts["TP 2"], lambda accelerator: accelerator.prepare(torch.nn.Linear(4, 4)))

    assert "Linear is no model of transformers" in message
    assert "--zero-stage 3, which shards any model" in message


def test_optimizer_of_a_model_that_was_not_prepared_is_refused(tools):
    def act(accelerator):
        accelerator.prepare(torch.optim.SGD(torch.nn.Linear(4, 3).parameters(), lr=0.1))

    message = refused(tools, tools.layouts["DP 2 with ZeRO-1"], act)

    assert "a parameter of shape [3, 4] that is in no model given to Accelerator.prepare" in message


def test_clipping_by_value_is_refused(tools):
    message = refused(tools, tools.layouts["TP 2"], lambda accelerator: accelerator.clip_grad_value_([], 1.0))

    assert "use clip_grad_norm_" in message


def test_layout_after_accelerate_has_started_is_refused(tools):
    def run():
        from accelerate import Accelerator
        from nxd_hf_trainer import under_trainer

        with tools.at(None):
            Accelerator(cpu=True)
            with under_trainer(zero_stage=1):
                pass

    with pytest.raises(RankFailure, match="Accelerate has started before the layout was chosen; call under_trainer"):
        run_on_ranks(run, 1)
