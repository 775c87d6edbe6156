"""Resumes a run from its newest checkpoint, on disk or in host memory, after checking that it belongs to the run.

A test checks that every key of a recipe has a rule, so that no change goes unreported.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Literal

import nxd_ckpt
from nxd_ckpt import Checkpoint, CheckpointError, CheckpointInfo
from nxd_ckpt.errors import RanksLostError
from nxd_engine.checkpoints.load import load_checkpoint
from nxd_engine.checkpoints.merged_weights import holds_average
from nxd_engine.checkpoints.model_description import (
    InitialWeights,
    ModelDescription,
    find_description,
    holds_adapter_alone,
)
from nxd_engine.checkpoints.stored_values import USER_CONTENT, unpack_value
from nxd_engine.logs import get_logger
from nxd_engine.rank_sync import run_or_raise_peer_error
from nxd_state import all_gather_object, get_mesh, get_world_group, seed_model_parallel, set_rng_state
from torch import Tensor

from nxd_trainer.optimizers import scheduled_rate
from nxd_trainer.recipe import Recipe, flat_recipe, recipe_from_dict, recipe_keys, recipe_to_dict
from nxd_trainer.recipe.rules import listed
from nxd_trainer.recipe.sections import OptimizerSection
from nxd_trainer.training.initial_weights import load_base, load_first_weights, model_differences
from nxd_trainer.training.run_state import EarlyStopping, RunState, on_first_rank_of_each_host
from nxd_trainer.training.saving import average_tensors, describe_data, memory_url, own_rng_state

_logger = get_logger("nxd_trainer")

# free: changes results only by rounding, or is reported elsewhere. reported: deliberately changes the rest of the run.
# refused: the value must be the same. compared: its result must be the same: the model, its tokens and
# their order, or the weights that adapters need.
Rule = Literal["free", "reported", "refused", "compared"]

_OF_SECTIONS: dict[str, Rule] = {
    "model": "compared",
    "parallel": "free",
    "moe": "reported",
    "pipeline": "free",
    "data": "compared",
    "train": "reported",
    "optimizer": "reported",
    "lora": "refused",
    "dpo": "refused",
    "checkpoint": "free",
    "": "free",
}
_OF_KEYS: dict[str, Rule] = {
    "model.path": "reported",  # the weights now come from the checkpoint
    "model.towers": "refused",
    "parallel.zero_stage": "reported",  # it adds master weights for low-precision weights
    "data.evaluation_path": "reported",
    "data.cache_folder": "free",
    "train.stop_after": "free",
    "train.gradient_accumulation_steps": "free",
    "train.log_every": "free",
    "train.gradient_histograms_every": "free",
    "train.report_to": "free",
    "train.seed": "compared",
    "train.dtype": "refused",
    "optimizer.type": "refused",
    "optimizer.factory": "refused",
    "lora.save": "free",  # except for merged weights
    "checkpoint.initial_weights": "reported",
}


def rule_of(key: str) -> Rule:
    """Return the rule for a run that resumes with a different value for a key, such as "train.steps"."""
    return _OF_KEYS[key] if key in _OF_KEYS else _OF_SECTIONS[key.rpartition(".")[0]]


def changes_to_report(recipe: Recipe, of_checkpoint: Mapping[str, Any]) -> list[str]:
    """Return lines such as "optimizer.lr 0.001 -> 0.01" for the changed keys that must be reported.

    Keys that the checkpoint's recipe lacks have their defaults.
    """
    contents = (recipe_to_dict(recipe_from_dict({})), of_checkpoint, recipe_to_dict(recipe))
    defaults, theirs, own = (
        {key: value for key, value in flat_recipe(it).items() if value is not None} for it in contents
    )
    lines = []
    for name in recipe_keys():
        if rule_of(name) == "reported":
            before, now = (it.get(name, defaults.get(name)) for it in (theirs, own))
            lines += [f"{name} {before} -> {now}"] if before != now else []
    return lines


def rate_change(recipe: Recipe, of_checkpoint: Mapping[str, Any], step: int) -> str | None:
    """Return a line with the learning rate of a step by the recipe and by the checkpoint's; None if they are equal."""
    known = {field.name for field in fields(OptimizerSection)}
    options = {name: it for name, it in of_checkpoint.get("optimizer", {}).items() if name in known and it is not None}
    steps = of_checkpoint.get("train", {}).get("steps", recipe.train.steps)
    before = f"{scheduled_rate(OptimizerSection(**options), step, total_steps=steps):.1e}"
    now = f"{scheduled_rate(recipe.optimizer, step, total_steps=recipe.train.steps):.1e}"
    if before == now:
        return None
    return (
        f"the learning rate of step {step + 1} is {now} by the new length and schedule, and was {before} by those of "
        "the checkpoint (optimizer.schedule=constant keeps it at optimizer.lr)"
    )


def resume_run(state: RunState) -> str | None:
    """Resume from the newest checkpoint on disk, as the recipe's `checkpoint.resume` says. Call it on all ranks.

    Returns:
        A label of the checkpoint; None if the run starts from scratch, or with the weights that the recipe names.

    Raises:
        ValueError: a checkpoint is required but there is none; or `resume` is "never" but the folder holds checkpoints,
            which a new run must not mix with; or the checkpoint has a different model or data.
    """
    wish, folder = state.recipe.checkpoint.resume, state.recipe.checkpoint_folder
    newest = newest_on_disk(state.recipe)
    if newest is None:
        if wish == "required":
            raise ValueError(f"checkpoint.resume=required, but there is no complete checkpoint in {folder}")
        load_first_weights(state)
        if state.average is not None:
            state.average.restart()
        return None
    if wish == "never":
        raise ValueError(
            f"checkpoint.resume=never, but {folder} holds checkpoints up to {newest.tag}; choose another output folder "
            "or remove them"
        )
    resume_from(state, folder, newest.tag)
    return newest.tag


def resume_from_memory(state: RunState) -> str | None:
    """Resume from the newest checkpoint in host memory, unless the one on disk is newer. Call it on all ranks.

    Checkpoints that cannot be read, because more hosts are lost than have copies, are skipped.

    Returns:
        A label of the checkpoint; None if there is none to resume from.

    Raises:
        CheckpointError: a damaged checkpoint may have partly filled the run, and there is no other one.
    """
    url = memory_url(state.recipe)
    if url is None or state.recipe.checkpoint.resume == "never":
        return None
    on_disk = newest_on_disk(state.recipe)
    newest = -1 if on_disk is None else on_disk.step or 0
    damage: CheckpointError | None = None
    for info in _listed_by_first_rank(url):
        if info.step is None or info.step < newest:
            continue
        try:
            resume_from(state, url, info.tag)
        except RanksLostError:
            raise
        except CheckpointError as error:  # on all ranks; the next load overwrites the tensors that it filled
            _logger.warning(f"skipping {info.tag} in the memory of the hosts: {error}")
            damage = error if _has_all_files(url, info.tag) else damage
            continue
        return f"{info.tag} in the memory of the hosts"
    if damage is not None and on_disk is None:  # the run would otherwise start from partly filled weights
        raise CheckpointError(f"the only checkpoint to resume from is damaged, in memory: {damage}") from damage
    return None


def _has_all_files(url: str, tag: str) -> bool:
    """Whether the first rank sees all files; if so, loading has started to fill tensors."""
    found = False
    if get_world_group().rank == 0:
        try:
            nxd_ckpt.open_checkpoint(url, tag).check_files()
            found = True
        except (CheckpointError, OSError):
            pass
    of_first: bool = all_gather_object(found, get_world_group())[0]
    return of_first


def _listed_by_first_rank(url: str) -> list[CheckpointInfo]:
    """List the checkpoints that the first rank sees, newest first: other hosts may reach different ones."""
    found: list[CheckpointInfo] = []
    if get_world_group().rank == 0:
        try:
            found = nxd_ckpt.list_checkpoints(url)
        except (CheckpointError, OSError) as error:  # fall back to the disk
            _logger.warning(f"skipping the memory of the hosts: {error}")
    of_first: list[CheckpointInfo] = all_gather_object(found, get_world_group())[0]
    return of_first[::-1]


def newest_on_disk(recipe: Recipe) -> CheckpointInfo | None:
    """Find the newest checkpoint in the run's folder. Call it on all ranks.

    Raises:
        ValueError: one of the checkpoints is damaged; the user must decide whether to resume from an older one.
    """

    def find() -> CheckpointInfo | None:
        try:
            return nxd_ckpt.latest(recipe.checkpoint_folder)
        except CheckpointError as damage:
            raise ValueError(f"{damage}; remove that folder to resume without it") from damage

    return on_first_rank_of_each_host(find)


def resume_from(state: RunState, root: Path | str, tag: str) -> None:
    """Restore a run from a checkpoint. Call it on all ranks.

    Raises:
        ValueError: the checkpoint has a different model or data.
        CheckpointError: the checkpoint is damaged; on all ranks.
    """
    checkpoint = run_or_raise_peer_error(
        f"opening {root}/{tag}", lambda: nxd_ckpt.open_checkpoint(root, tag), error_type=CheckpointError
    )
    where = f"{root}/{tag}"
    content = _run_content(checkpoint, root)
    is_merged = content["recipe"].get("lora", {}).get("save") == "merged"
    if is_merged and state.recipe.lora.save == "merged":
        raise ValueError(
            f"{where} holds weights with the adapter merged into them (lora.save=merged), which cannot be resumed; "
            "choose another output folder. Runs with lora.save=adapter or both can resume"
        )
    description = find_description(checkpoint)
    needs_base = holds_adapter_alone(checkpoint)
    _check_same_run(state, description, content, where, needs_base=needs_base)
    own, initial = state.description.initial, None if description is None else description.initial
    if initial is not None and (own is None or own.fingerprint != initial.fingerprint):
        state.description = replace(state.description, initial=initial)
    if needs_base:
        load_base(state)
    changes = changes_to_report(state.recipe, content["recipe"])
    if changes:
        _logger.warning(f"keys have changed since {where} was written: {'; '.join(changes)}")
    if rates := rate_change(state.recipe, content["recipe"], checkpoint.step or 0):
        _logger.warning(rates)
    # The recipe and its schedule say what the learning rate and the other settings are.
    load_checkpoint(root, tag, model=state.model, optimizer=state.optimizer, optimizer_settings=False)
    if state.average is not None:
        state.average.restart()
        if holds_average(checkpoint):
            into = average_tensors(state.average, state.model, with_copies=True)
            nxd_ckpt.load(root, tag, into=into, strict=False)
        else:
            _logger.warning(
                f"{where} has no average of the weights; the average starts from its weights (train.ema_decay)"
            )
    state.train_loader.load_state_dict(content["train_loader"])
    state.early_stopping.load_state_dict(content.get("early_stopping", EarlyStopping(0, 0.0).state_dict()))
    state.optimizer.load_precision_state(content.get("precision", {}))
    state.step = checkpoint.step or 0
    rng_state = own_rng_state()
    if checkpoint.mesh == asdict(get_mesh()) and rng_state.keys() <= checkpoint.tensors.keys():
        nxd_ckpt.load(root, tag, into=rng_state, strict=False)
        _set_own_rng_state(rng_state)
    else:  # random states of another layout or device type do not apply: start new ones
        seed_model_parallel(state.recipe.train.seed + state.step)


def _run_content(checkpoint: Checkpoint, root: Path | str) -> dict[str, Any]:
    """Return the run's values in its checkpoint; old checkpoints do not keep them as user content."""
    content = unpack_value(checkpoint, USER_CONTENT) or checkpoint.objects
    if not isinstance(content, dict) or not {"recipe", "data", "train_loader"} <= content.keys():
        raise ValueError(
            f"{root}/{checkpoint.tag} is not a checkpoint of nxd train: it has no position in the data. To start a run "
            f"from its weights, choose another output folder and set checkpoint.initial_weights={root}"
        )
    return content


def _check_same_run(
    state: RunState, description: ModelDescription | None, content: dict[str, Any], where: str, *, needs_base: bool
) -> None:
    """Raise ValueError if the checkpoint has a different model, precision, text or adapters."""
    recipe, defaults = recipe_to_dict(state.recipe), recipe_to_dict(Recipe())
    data = describe_data(state)
    own: dict[str, dict[str, object]] = {
        "data": {"held_out_fraction": data["held_out_fraction"]},
        "train": {"dtype": state.recipe.train.dtype},
    }
    theirs = {**content["recipe"], "data": content["data"]}
    for section in ("lora", "dpo"):
        theirs[section] = defaults[section] | theirs.get(section, {})  # older runs lack some of these keys
    own["optimizer"] = {name: recipe["optimizer"].get(name) for name in ("type", "factory")}
    theirs["optimizer"] = {"type": "adamw", **theirs.get("optimizer", {})}  # older runs lack the type
    may_change = ("save",) if theirs["lora"].get("save") != "merged" else ()
    lora = {name: value for name, value in recipe["lora"].items() if name not in may_change}
    own["lora"] = lora if state.recipe.lora.rank else {"rank": 0}
    own["dpo"] = recipe["dpo"]
    own["model"] = {"towers": state.recipe.model.use_of_towers}
    theirs["model"] = {"towers": Recipe().model.use_of_towers, **theirs.get("model", {})}
    initial = None if description is None else description.initial
    # Adapters and preferences depend on the initial weights.
    saves_adapter = state.recipe.lora.rank > 0 and state.recipe.lora.save == "adapter"
    needs_initial = needs_base or saves_adapter or state.recipe.dpo.beta > 0
    if needs_initial and initial is None:
        own["train"]["seed"] = state.recipe.train.seed
        own["checkpoint"] = {"initial_weights": recipe["checkpoint"].get("initial_weights")}
        own["model"]["path"] = recipe["model"].get("path")
    differences = [
        f"{section}.{name} is {value}, the checkpoint has {theirs[section].get(name)}"
        for section, values in own.items()
        for name, value in values.items()
        if theirs[section].get(name) != value
    ]
    if data["digest"] != content["data"].get("digest"):
        differences += _data_differences(recipe["data"], data, content)
    other = description or ModelDescription({})
    if needs_initial and initial is not None and not _can_be_found(initial, state.description.initial):
        known = state.description.initial or "not in the place that the recipe names"
        differences.append(f"the initial weights are {known}, the checkpoint has those of {initial}")
    differences = model_differences(state.description, other, "the checkpoint has") + differences
    if differences:
        raise ValueError(
            f"{where} belongs to another run: {'; '.join(differences)}. Restore that, or use another output folder, "
            f"where checkpoint.initial_weights={state.recipe.checkpoint_folder} starts a new run from these weights"
        )


def _data_differences(recipe: Mapping[str, Any], data: Mapping[str, Any], content: Mapping[str, Any]) -> list[str]:
    """Say why the tokens are not those of the checkpoint: by the keys that have changed, or else by the sources."""
    before = content["recipe"].get("data", {})
    keys = [key.field for key in recipe_keys().values() if key.section == "data" and rule_of(key.name) == "compared"]
    changed = [
        f"data.{name} is {recipe.get(name, 'unset')}, the checkpoint has {before.get(name, 'unset')}"
        for name in keys
        if name != "held_out_fraction" and recipe.get(name) != before.get(name)
    ]
    if changed:
        return changed
    known = content["data"].get("sources", {})
    names = [name for name, digest in data["sources"].items() if known.get(name) != digest]
    return [f"{listed(names, 'and') if names else 'the data'} or the tokenizer has changed since the checkpoint"]


def _can_be_found(theirs: InitialWeights, own: InitialWeights | None) -> bool:
    """Whether a run can find the weights that a checkpoint needs: its own, or another checkpoint beside its own."""
    if own is None:
        return False
    return theirs.fingerprint == own.fingerprint or (theirs.tag is not None and theirs.folder == own.folder)


def _set_own_rng_state(tensors: dict[str, Tensor]) -> None:
    streams: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        _, _, stream, kind = name.split("/")
        streams.setdefault(stream, {})[kind] = tensor
    set_rng_state(streams)
