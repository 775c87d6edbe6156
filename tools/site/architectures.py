"""A page for each transformers architecture that was compared: its layouts, default sizes, and commands to use it."""

import re
from pathlib import Path

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "hf-support.md"
SIZES = (
    ("hidden_size", "hidden size"),
    ("intermediate_size", "intermediate size"),
    ("num_hidden_layers", "layers"),
    ("num_attention_heads", "query heads"),
    ("num_key_value_heads", "key/value heads"),
    ("num_experts", "experts"),
    ("num_local_experts", "experts"),
    ("n_routed_experts", "experts"),
    ("num_experts_per_tok", "experts per token"),
    ("vocab_size", "vocabulary"),
    ("max_position_embeddings", "positions"),
)

ALWAYS_DECODERS = ("gpt_neox", "gpt_neox_japanese")  # their configs have is_decoder, which the models do not read
# Whisper computes its loss in its own way; files of Inkling 2 interleave two weights, which cannot be read in parts.
NOT_TRAINED = ("whisper", "inkling2_text", "inkling2_loop_text")
# Planning needs one list of layers that run on tensors without values and pass gradients to the embedding.
NOT_PLANNED = ("diffllama", "hrm_text", "longcat_flash", "qwen4_exp_text")

# Serving compiles models that keep keys and values, and nothing else, for each layer, and that follow positions.
NOT_SERVED = """
    axk2 bailing_hybrid bamba bloom deepseek_v32 deepseek_v4 dory dots3_note_text falcon_h1 gemma3n_text
    glm_moe_dsa granitemoehybrid hrm_text hy_v4 inkling_text jamba kimi_linear lara_mini lfm2 lfm2_moe lfm3
    llama4_text longcat_flash mamba2 minimax nemotron_h olmo_hybrid opt qwen3_5_moe_text qwen3_5_text qwen3_next
    qwen4_exp_text zaya
"""


def architecture_pages() -> dict[str, str]:
    """Return a page for each architecture of the support tables, and their index."""
    outcomes = _outcomes(DOCUMENT.read_text(encoding="utf8"))
    pages = {f"reference/architectures/{name}.md": _page(name, layouts) for name, layouts in outcomes.items()}
    rows = [f"- [{name}](architectures/{name}.md): {_summary(layouts)}" for name, layouts in outcomes.items()]
    index = ["# Architectures", "", "Each was compared with one process at the layouts of its page.", "", *rows]
    return {"reference/architectures.md": "\n".join(index), **pages}


def _outcomes(text: str) -> dict[str, dict[str, str]]:
    """Return each architecture's outcomes by layout, from the tables between the document's markers."""
    found: dict[str, dict[str, str]] = {}
    for table in re.findall(r"<!-- made by [^>]+ begin -->(.*?)<!-- made by", text, flags=re.DOTALL):
        header, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
        for name, *cells in rows:
            if len(cells) == len(header) - 1:
                found.setdefault(name, {}).update(zip(header[1:], cells, strict=True))
    return dict(sorted(found.items()))


def _summary(layouts: dict[str, str]) -> str:
    passed = sum(outcome == "pass" for outcome in layouts.values())
    return f"{passed} of {len(layouts)} layouts pass"


def _page(name: str, layouts: dict[str, str]) -> str:
    lines = [f"# {name}", "", "## Layouts compared with one process", "", "| layout | outcome |", "| --- | --- |"]
    lines += [f"| {layout} | {outcome} |" for layout, outcome in layouts.items()]
    lines += ["", "The outcomes are explained on [the page of all architectures](../hf-support.md).", ""]
    config = CONFIG_MAPPING[name]() if name in CONFIG_MAPPING else None
    values = config.to_dict() if config is not None else {}
    names = config.attribute_map if config is not None else {}
    sizes = {label: values[names.get(key, key)] for key, label in SIZES if names.get(key, key) in values}
    shown = [f"| {label} | {value:,} |" for label, value in sizes.items() if isinstance(value, int)]
    if shown:
        lines += ["## Default sizes in transformers", "", "| size | value |", "| --- | --- |", *shown, ""]
    is_decoder = values.get("is_decoder", True) or name in ALWAYS_DECODERS
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and is_decoder and name not in NOT_TRAINED:
        lines += [*_commands(name, layouts), ""]
    return "\n".join(lines)


def _commands(name: str, layouts: dict[str, str]) -> list[str]:
    """Return the section of commands, at TP 2 if the architecture trains so, else on one rank."""
    split = layouts.get("TP 2") == "pass"
    ranks, tp = (" --nproc 2 parallel.tensor_parallel_size=2", " --tensor-parallel-size 2") if split else ("", "")
    return [
        "## Commands",
        "",
        "`model` is the folder of a Hugging Face model of this architecture.",
        "",
        "```sh",
        f"nxd train model.path=model data.path=chats.jsonl data.chat=true output=run{ranks}",
        f"nxd generate run/checkpoints --chat --prompt Hello{tp}",
        *([] if name in NOT_SERVED.split() else [f"nxd serve run/checkpoints{tp}"]),
        *([] if name in NOT_PLANNED else ["nxd plan model --device trn2 --devices 32"]),
        "```",
        *(
            ["", "`nxd serve` cannot compile this architecture; `nxd generate` runs it."]
            if name in NOT_SERVED.split()
            else []
        ),
    ]
