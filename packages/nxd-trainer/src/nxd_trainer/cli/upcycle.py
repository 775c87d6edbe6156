"""`nxd upcycle`: make a mixture of experts from a dense Hugging Face folder."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from nxd_cli.command import parse, reports_user_errors


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nxd upcycle")
    parser.add_argument("dense", type=Path, help="folder of a Llama, Mistral, Qwen2 or Qwen3 with safetensors")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--experts", type=int, required=True, help="experts per layer, copies of its MLP")
    parser.add_argument("--top-k", type=int, default=2, help="experts per token (default: %(default)s)")
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="maximum size of a file, such as 500MiB (default: %(default)s)",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Write the folder and print its path."""
    options = parse(_parser(), arguments)
    from nxd_trainer.upcycle import upcycle  # noqa: PLC0415 - it loads torch

    target = reports_user_errors(
        lambda: upcycle(
            options.dense,
            options.target,
            num_experts=options.experts,
            top_k=options.top_k,
            max_shard_size=options.max_shard_size,
        )
    )
    print(f"wrote {target}; train it with: nxd train --model.path {target} --moe.aux_loss_coef 0.01")
    return 0
