"""`nxd serve`: answer completion requests with a trained model."""

import argparse

from nxd_trainer.cli.command import Commands, add_checkpoint, add_tokenizer, check_own_process, reports_user_errors


def add_parser(commands: Commands) -> None:
    """Add `serve` to the commands."""
    parser = commands.add_parser("serve", help="answer completion requests with a trained model")
    add_checkpoint(parser)
    add_tokenizer(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, metavar="P", help="0: a free one (default: %(default)s)")
    parser.add_argument("--name", default="nxd", help="of the model, in requests (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, metavar="N", help="prompts at a time (default: 4)")
    parser.add_argument("--max-length", type=int, metavar="N", help="of prompt and completion; unset: the model's")
    parser.add_argument("--max-waiting", type=int, default=64, metavar="N", help="prompts in the queue (default: 64)")
    parser.add_argument("--compiler", help="inductor or export; unset: what this machine has")
    parser.add_argument("--nproc", type=int, metavar="N", help="tensor-parallel worker processes (default: 1)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compile the model, and serve it until a signal comes."""
    reports_user_errors(lambda: check_own_process(options.nproc, "nxd serve"))

    from nxd_trace.serving import CompletionService, ServerLimits, check_installed, serve  # noqa: PLC0415

    from nxd_trainer.compiled_generation import open_for_compilation  # noqa: PLC0415

    reports_user_errors(check_installed)  # before the minutes that compiling may take
    checkpoint = reports_user_errors(
        lambda: open_for_compilation(options.checkpoints, options.tag, tokenizer=options.tokenizer)
    )
    generator = reports_user_errors(
        lambda: checkpoint.compile(
            batch_size=options.batch_size,
            max_length=options.max_length,
            tp_degree=options.nproc or 1,
            compiler=options.compiler,
        )
    )
    with generator:
        limits = ServerLimits(max_waiting=options.max_waiting)
        service = CompletionService(generator.engine, checkpoint.tokenizer, model=options.name, limits=limits)
        serve(service, host=options.host, port=options.port)
    return 0
