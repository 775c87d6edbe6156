"""Finds the source of a run's model, and the files that make its checkpoints self-contained.

Nothing here communicates: it reads folders, and is called once per host.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nxd_ckpt
from nxd_ckpt import CheckpointError
from nxd_ckpt.interop import GENERATION_CONFIG_FILE, is_of_tokenizer, read_companions
from nxd_data import ChatTemplate, Conversation, Tokenizer
from nxd_engine.checkpoints.find import find_checkpoint
from nxd_engine.checkpoints.model_description import BYTES, InitialWeights, find_description, holds_adapter_alone
from nxd_engine.hugging_face import CONFIG_FILE
from nxd_engine.hugging_face.folder import parse_json_object
from nxd_engine.hugging_face.loading import weights_fingerprint

from nxd_trainer.from_recipe import tokenizer_of
from nxd_trainer.recipe import Recipe

_QUESTION, _ANSWER = "Yes?", "Indeed."


@dataclass(frozen=True)
class Origin:
    """The source of a run's model, as its checkpoints record it."""

    initial: InitialWeights | None  # the initial weights, if they are needed again and can be found
    files: Mapping[str, bytes]  # files of the tokenizer, the chat template and generation
    notes: list[str]  # lines about them


def find_origin(recipe: Recipe, config: Mapping[str, Any]) -> Origin:
    """Read the files of a recipe's model, which has this config, besides its weights.

    Raises:
        ValueError: a file has the wrong contents for its name, or is a link out of its folder; or the checkpoint with
            the initial weights is damaged.
    """
    needs_initial = recipe.lora.rank > 0 or recipe.dpo.beta > 0 or recipe.model.towers == "left_out"
    files, notes = model_files(recipe, config)
    return Origin(find_initial(recipe) if needs_initial else None, files, notes)


def find_initial(recipe: Recipe) -> InitialWeights | None:
    """Find the weights of the whole model that a run with adapters or preferences starts from.

    None if they could not be found again: random weights, those of a factory or of NeuronX Distributed, or missing
    ones, which a new run reports when it loads them.

    Raises:
        ValueError: a checkpoint is damaged.
    """
    initial, origin = recipe.checkpoint.initial_weights, recipe.model.path
    if initial is None or (initial / CONFIG_FILE).is_file():
        folder = origin if initial is None else initial
        return None if folder is None or not (folder / CONFIG_FILE).is_file() else _of_folder(folder)
    try:
        found = find_checkpoint(initial, None)
    except CheckpointError:
        return None
    if found.layout != "nxd":
        return None
    checkpoint = nxd_ckpt.open_checkpoint(found.root, found.tag)
    if not holds_adapter_alone(checkpoint):
        return InitialWeights(os.path.abspath(found.root), found.tag, checkpoint.save_id)
    described = find_description(checkpoint)
    base = None if described is None else described.initial
    own = None if origin is None or not (origin / CONFIG_FILE).is_file() else _of_folder(origin)
    is_own = own is not None and (base is None or own.fingerprint == base.fingerprint)  # it may have moved
    return own if is_own else base


def _of_folder(folder: Path) -> InitialWeights:
    return InitialWeights(os.path.abspath(folder), None, weights_fingerprint(folder))


def model_files(recipe: Recipe, config: Mapping[str, Any]) -> tuple[dict[str, bytes], list[str]]:
    """Return the files of a run's tokenizer and of its initial model's generation settings, with notes."""
    tokenizer, name = tokenizer_of(recipe)
    files = {} if name == BYTES else read_companions(name)
    files = {name: content for name, content in files.items() if is_of_tokenizer(name)}
    folders = (recipe.checkpoint.initial_weights, recipe.model.path)
    folder = next((it for it in folders if it is not None and (it / CONFIG_FILE).is_file()), None)
    beside = {} if folder is None else read_companions(folder)
    files |= {name: content for name, content in beside.items() if not is_of_tokenizer(name)}
    if name == BYTES or not (recipe.data.chat or recipe.dpo.beta):
        return files, []
    try:
        turn = _end_of_turn(ChatTemplate(name), tokenizer)
    except ValueError:  # no template, or one that refuses such a short conversation
        return files, []
    if turn is None:
        return files, ["the chat template has no token that ends answers; nxd generate --stop TEXT ends them"]
    content: dict[str, Any] = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key)}
    if GENERATION_CONFIG_FILE in files:
        content = parse_json_object(GENERATION_CONFIG_FILE, files[GENERATION_CONFIG_FILE])
    named = content.get("eos_token_id", config.get("eos_token_id"))
    ends = [token for token in (named if isinstance(named, list) else [named]) if isinstance(token, int)]
    if turn in ends:
        return files, []
    content["eos_token_id"] = [*ends, turn]
    told = tokenizer.decode([turn], skip_special_tokens=False)
    note = f"the chat template ends answers with {told}: generation from this run's checkpoints stops there, too"
    return {**files, GENERATION_CONFIG_FILE: (json.dumps(content, indent=2) + "\n").encode()}, [note]


def _end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the special token that a chat template puts after an answer; None if there is none.

    Raises:
        ValueError: the template refuses the conversation.
    """
    said = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    ids = template.encode("a conversation", Conversation(said))[0].tolist()
    ends = (count for count in range(len(ids)) if _ANSWER in tokenizer.decode(ids[:count]))
    return next((token for token in ids[next(ends, len(ids)) :] if token in tokenizer.special_ids), None)
