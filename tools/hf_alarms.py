"""Whether `nxd parity` raises an alarm where nothing is wrong: right layouts of every surveyed architecture.

Each architecture of text in `tools/hf_support.py` trains two steps at TP 2, PP 2, TP 2 x PP 2, and DP 2 with ZeRO-1, in
float64, float32 and bfloat16, and is compared with one process. In float64 all agree, so what differs in the others is
a false alarm.

    python tools/hf_alarms.py                                 all: some hours on two cores
    python tools/hf_alarms.py --precision bfloat16            one precision
    python tools/hf_alarms.py --layout "TP 2" llama gemma2    some

Leaves nothing behind. The exit code is 1 if there is an alarm.
"""

import argparse
import sys
from collections import Counter
from typing import Any

import torch
from hf_survey.architectures import surveyed, tiny_batch, tiny_model
from hf_survey.vision import VISION_FAMILIES
from nxd_layers.hf import parallelize
from nxd_testing import RankFailure, RankPool
from nxd_trainer.parity import ParityCase, compare

MICROBATCHES = 2
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP 2": (2, {"tensor_parallel_size": 2}),
    "PP 2": (2, {"pipeline_parallel_size": 2}),
    "TP 2 x PP 2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "DP 2 + ZeRO-1": (2, {"optimizer_config": {"zero_one_enabled": True}}),
}
PRECISIONS = ("float64", "float32", "bfloat16")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", metavar="model_type", help="as transformers names them; all if none")
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="all if none")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="all if none")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one comparison")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    with RankPool() as pool:
        for model_type in options.model_types or [it for it in surveyed() if it not in VISION_FAMILIES]:
            for layout in options.layout or LAYOUTS:
                for precision in options.precision or PRECISIONS:
                    try:
                        result = pool.run(
                            compared, LAYOUTS[layout][0], model_type, layout, precision, timeout=options.timeout
                        )[0]
                    except RankFailure as failure:
                        first = next(iter(failure.failures.values()))
                        result = f"not compared: {first.summary.strip().splitlines()[0]}"
                    counts[result.partition(":")[0]] += 1
                    print(f"{model_type:24} {layout:14} {precision:9} {result}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return int(counts["ALARM"] > 0)


def compared(model_type: str, layout: str, precision: str) -> str:
    """Compare on each rank; returns what came of it."""
    batch = tiny_batch(model_type)
    config = dict(LAYOUTS[layout][1])
    is_tensor_parallel = "tensor_parallel_size" in config
    if "pipeline_parallel_size" in config:
        config["pipeline_config"] = {
            "num_microbatches": MICROBATCHES,
            "auto_partition": True,
            "input_names": list(batch),
        }
    case = ParityCase(
        model_fn=lambda: parallelize(tiny_model(model_type)) if is_tensor_parallel else tiny_model(model_type),
        reference_fn=lambda: tiny_model(model_type),
        batches=[batch, {name: it.flip(0) for name, it in batch.items()}],
        nxd_config=config,
    )
    report = compare(case, dtype=getattr(torch, precision))
    return "agrees" if report.agrees else f"ALARM: {report.findings[0]}"


if __name__ == "__main__":
    sys.exit(main())
