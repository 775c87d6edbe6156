"""`nxd generate`: write text with a trained model."""

import argparse
import os

from nxd_trainer.cli.command import (
    Commands,
    add_checkpoint,
    add_nproc,
    add_tokenizer,
    check_own_process,
    leave_mesh,
    reports_user_errors,
    started_ranks,
)

_LENGTHS = 128  # compiled lengths are multiples of this, so that other prompts find their programs in the cache


def add_parser(commands: Commands) -> None:
    """Add `generate` to the commands."""
    parser = commands.add_parser("generate", help="write text with a trained model")
    add_checkpoint(parser)
    add_tokenizer(parser)
    parser.add_argument("--prompt", default="def ", help="text to continue (default: %(default)r)")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: likeliest token (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=40, metavar="K", help="0: all tokens (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="compile the model first, for longer texts; with --nproc, tensor parallel in worker processes",
    )
    parser.add_argument("--compiler", help="with --compiled: inductor or export; unset: what this machine has")
    add_nproc(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the prompt and what the model writes after it."""
    if options.compiled:
        return _run_compiled(options)
    code = started_ranks(options)
    if code is not None:
        return code

    import torch  # noqa: PLC0415
    from nxd_state import get_world_group, initialize_model_parallel  # noqa: PLC0415

    from nxd_trainer.generate import generate, load_for_generation  # noqa: PLC0415

    initialize_model_parallel(int(os.environ.get("WORLD_SIZE", "1")))
    model, tokenizer = reports_user_errors(
        lambda: load_for_generation(options.checkpoints, options.tag, tokenizer=options.tokenizer)
    )
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
    new_tokens = reports_user_errors(lambda: [token for token in tokens if token != tokenizer.end_of_document])
    if get_world_group().rank == 0:
        print(options.prompt + tokenizer.decode(new_tokens))
    leave_mesh()
    return 0


def _run_compiled(options: argparse.Namespace) -> int:
    reports_user_errors(lambda: check_own_process(options.nproc, "--compiled"))

    from nxd_trace.generation import SamplingSettings  # noqa: PLC0415

    from nxd_trainer.compiled_generation import open_for_compilation  # noqa: PLC0415

    sampling = {
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "seed": options.seed,
    }
    reports_user_errors(lambda: SamplingSettings(**sampling))  # before the minutes that compiling may take
    checkpoint = reports_user_errors(
        lambda: open_for_compilation(options.checkpoints, options.tag, tokenizer=options.tokenizer)
    )
    tokenizer, end = checkpoint.tokenizer, checkpoint.tokenizer.end_of_document
    prompt = tokenizer.encode(options.prompt).tolist()
    needed = len(prompt) + options.max_new_tokens
    rounded = -(-needed // _LENGTHS) * _LENGTHS
    length = max(needed, min(rounded, checkpoint.max_positions))
    generator = reports_user_errors(
        lambda: checkpoint.compile(
            batch_size=1, max_length=length, tp_degree=options.nproc or 1, compiler=options.compiler
        )
    )
    with generator:
        (completion,) = reports_user_errors(lambda: generator.generate([prompt], stop_tokens=(end,), **sampling))
    print(options.prompt + tokenizer.decode(token for token in completion.tokens if token != end))
    return 0
