"""Trains a small Llama with tensor and pipeline parallelism, resumes it at another layout, writes text and exports it.

Takes about three minutes on two cores. Leaves the folder runs/demo behind (under 100 MB), which the next demo replaces.
Every step is a command that is printed before it is run, so that it can be repeated by hand.
"""

import argparse
import importlib.util
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = Path("tools/demo.toml")
OUTPUT = Path("runs/demo")
CHECKPOINTS = OUTPUT / "checkpoints"
EXPORTED = OUTPUT / "hugging-face"
TIMELINE = OUTPUT / "timeline.json"


def main() -> int:
    options = parse_arguments()
    began = time.perf_counter()
    shutil.rmtree(ROOT / OUTPUT, ignore_errors=True)
    size = [f"train.steps={options.steps}"]

    say(f"1. Train at TP 2 x PP 2 in microbatches, and stop at step {options.steps // 2}")
    layout = ["--parallel.tensor_parallel_size", "2", "--parallel.pipeline_parallel_size", "2"]
    pipeline = ["--train.gradient_accumulation_steps", "4", "--pipeline.trace_file", str(TIMELINE)]
    first_half = ["--train.stop_after", str(options.steps // 2)]
    nxd("train", str(RECIPE), "--nproc", "4", *layout, *pipeline, *first_half, *size)

    say("2. Resume from that checkpoint at TP 1 x DP 2")
    nxd("train", str(RECIPE), "--nproc", "2", *size)

    say("3. Write text, at TP 2")
    # Drawn, since so small a model's likeliest text repeats itself.
    drawn = ("--temperature", "0.8", "--max-new-tokens", "240")
    nxd("generate", str(CHECKPOINTS), "--nproc", "2", "--prompt", "def read(self", *drawn)

    say("4. Export to Hugging Face")
    nxd("export", str(CHECKPOINTS), str(EXPORTED))
    if importlib.util.find_spec("transformers") is None:
        print("   (transformers is not installed: its logits are not compared)")
    else:
        from compare_with_transformers import largest_logit_difference  # noqa: PLC0415  (needs transformers)

        difference = largest_logit_difference(ROOT / CHECKPOINTS, ROOT / EXPORTED)
        print(f"   largest difference between transformers' logits and ours: {difference:.1e}")

    say(f"Done in {time.perf_counter() - began:.0f} s. Files:")
    pictures = (OUTPUT / "report.html", TIMELINE.with_suffix(".png"), TIMELINE)
    for path in (*pictures, OUTPUT / "metrics.jsonl", OUTPUT / "tensorboard", CHECKPOINTS, EXPORTED):
        print(f"   {path}" if (ROOT / path).exists() else f"   {path} (not written: see above)")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=400, help="optimizer steps of the whole run (default: %(default)s)"
    )
    return parser.parse_args()


def say(text: str) -> None:
    print(f"\n{text}", flush=True)


def nxd(*arguments: str) -> None:
    """Run `nxd` with these arguments; ends the demo if it fails."""
    print(f"$ nxd {shlex.join(arguments)}", flush=True)
    result = subprocess.run([sys.executable, "-m", "nxd_cli", *arguments], cwd=ROOT, check=False)
    if result.returncode:
        sys.exit(f"demo: the command above failed with exit code {result.returncode}")


if __name__ == "__main__":
    sys.exit(main())
