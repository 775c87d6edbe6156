"""`nxd generate`: write text with a trained model."""

import argparse
import os

from nxd_trainer.cli.command import Commands, add_checkpoint, add_nproc, leave_mesh, mendable, started_ranks


def add_parser(commands: Commands) -> None:
    """Add `generate` to the commands."""
    parser = commands.add_parser("generate", help="write text with a trained model")
    add_checkpoint(parser)
    parser.add_argument("--prompt", default="def ", help="text to go on from (default: %(default)r)")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: likeliest token (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=40, metavar="K", help="0: all tokens (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    add_nproc(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the prompt and what the model writes after it."""
    code = started_ranks(options)
    if code is not None:
        return code

    import torch  # noqa: PLC0415
    from nxd_state import get_world_group, initialize_model_parallel  # noqa: PLC0415

    from nxd_trainer.generate import generate, load_for_generation  # noqa: PLC0415

    initialize_model_parallel(int(os.environ.get("WORLD_SIZE", "1")))
    model, tokenizer = mendable(lambda: load_for_generation(options.checkpoints, options.tag))
    prompt = torch.from_numpy(tokenizer.encode(options.prompt))
    tokens = generate(
        model,
        prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        end_token=tokenizer.end_of_document,
        seed=options.seed,
    )
    new_tokens = mendable(lambda: [token for token in tokens if token != tokenizer.end_of_document])
    if get_world_group().rank == 0:
        print(options.prompt + tokenizer.decode(new_tokens))
    leave_mesh()
    return 0
