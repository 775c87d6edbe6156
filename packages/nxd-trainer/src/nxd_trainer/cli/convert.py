"""The commands that convert models: `nxd import`, `nxd export` and `nxd upcycle`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from nxd_cli.command import UserError, make_parser, parse, reports_user_errors

from nxd_trainer.cli.arguments import add_checkpoint
from nxd_trainer.recipe.sections import DTYPE_NAMES


def import_hugging_face(arguments: Sequence[str]) -> int:
    """`nxd import`: make a checkpoint from a Hugging Face folder, and print its path."""
    parser = make_parser(
        "import",
        "Make a checkpoint from a Hugging Face folder.",
        examples=[
            "nxd import Qwen3-0.6B checkpoints",
            "nxd import Qwen3-0.6B checkpoints --tag base --dtype bfloat16",
        ],
    )
    parser.add_argument("folder", type=Path, help="Hugging Face folder with safetensors and config.json")
    parser.add_argument("checkpoints", type=Path, help="folder of checkpoints to write to")
    parser.add_argument("--tag", default="imported", help="name of the checkpoint (default: %(default)s)")
    _add_dtype(parser)
    options = parse(parser, arguments)
    from nxd_engine import hugging_face  # noqa: PLC0415 - it loads torch

    from nxd_trainer.forward import DTYPES  # noqa: PLC0415

    dtype = None if options.dtype is None else DTYPES[options.dtype]
    reports_user_errors(
        lambda: hugging_face.import_hugging_face(options.folder, options.checkpoints, options.tag, dtype=dtype)
    )
    print(f"wrote {options.checkpoints / options.tag}")
    return 0


def export(arguments: Sequence[str]) -> int:
    """`nxd export`: write a Hugging Face folder from a checkpoint, and print its files."""
    parser = make_parser(
        "export",
        "Write a Hugging Face folder from a checkpoint.",
        examples=[
            "nxd export run exported",
            "nxd export run exported --tag step-00000100 --dtype bfloat16",
            "nxd export run exported --like Qwen3-0.6B",
            "nxd export run adapter --adapter",
        ],
    )
    add_checkpoint(parser)
    parser.add_argument("target", type=Path, help="folder to write")
    _add_dtype(parser)
    parser.add_argument(
        "--like",
        type=Path,
        metavar="FOLDER",
        help="folder of the same model, for its config and tensor names, its tokenizer if the checkpoint has none, and "
        "the base weights of an adapter; unset: the checkpoint's own description",
    )
    parser.add_argument(
        "--ema", action="store_true", help="write the moving average of the weights, from a run with train.ema_decay"
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the LoRA adapter alone, as PEFT's adapter_config.json and adapter_model.safetensors",
    )
    _add_max_shard_size(parser)
    options = parse(parser, arguments)
    from nxd_trainer.export import export_adapter, export_hugging_face  # noqa: PLC0415 - it loads torch
    from nxd_trainer.forward import DTYPES  # noqa: PLC0415

    if options.adapter:
        if options.like is not None or options.dtype is not None or options.ema:
            raise UserError("--adapter writes the adapter as it is stored; leave out --like, --dtype and --ema")
        folder = reports_user_errors(lambda: export_adapter(options.checkpoints, options.target, options.tag))
        print(f"wrote {folder / 'adapter_config.json'} and {folder / 'adapter_model.safetensors'}")
        return 0

    target = reports_user_errors(
        lambda: export_hugging_face(
            options.checkpoints,
            options.target,
            options.tag,
            like=options.like,
            dtype=None if options.dtype is None else DTYPES[options.dtype],
            max_shard_size=options.max_shard_size,
            averaged=options.ema,
        )
    )
    weights = sorted(target.glob("*.safetensors"))
    written = str(weights[0]) if len(weights) == 1 else f"{len(weights)} files of weights"
    print(f"wrote {target / 'config.json'} and {written}")
    return 0


def upcycle(arguments: Sequence[str]) -> int:
    """`nxd upcycle`: make a mixture of experts from a dense Hugging Face folder, and print the path."""
    parser = make_parser(
        "upcycle",
        "Make a mixture of experts from a dense Hugging Face model.",
        examples=[
            "nxd upcycle Qwen3-0.6B Qwen3-8x0.6B --experts 8",
            "nxd upcycle Qwen3-0.6B Qwen3-8x0.6B --experts 8 --top-k 1",
        ],
    )
    parser.add_argument("dense", type=Path, help="folder of a Llama, Mistral, Qwen2 or Qwen3 with safetensors")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--experts", type=int, required=True, help="experts per layer, each a copy of the dense MLP")
    parser.add_argument("--top-k", type=int, default=2, help="experts per token (default: %(default)s)")
    _add_max_shard_size(parser)
    options = parse(parser, arguments)
    from nxd_trainer.upcycle import upcycle  # noqa: PLC0415 - it loads torch

    sizes = {"num_experts": options.experts, "top_k": options.top_k, "max_shard_size": options.max_shard_size}
    target = reports_user_errors(lambda: upcycle(options.dense, options.target, **sizes))
    print(f"wrote {target}; train it with: nxd train --model.path {target} --moe.aux_loss_coef 0.01")
    return 0


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="dtype of the weights; as stored if unset")


def _add_max_shard_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="maximum size of a file, such as 500MiB (default: %(default)s)",
    )
