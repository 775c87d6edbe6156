"""Which architectures of transformers train in parallel with the numbers of one process: makes the table of the docs.

Every text decoder that has a tensor-parallel plan is shrunk to a few thousand parameters and takes one step at TP
2, PP 2 and TP 2 x PP 2, at six layouts with CP, and one with experts at six layouts with EP; loss and all gradients are
compared with one process in float64, to a relative 1e-10. An architecture passes, is refused by our packages with the
reason, or differs. Families of vision-language models take the step with images in their rows, and without.

    python tools/hf_support.py                      all architectures: half an hour or so on two cores
    python tools/hf_support.py --only experts       mixtures of experts at the layouts with EP
    python tools/hf_support.py --only context       all architectures at the layouts with CP
    python tools/hf_support.py --only vision        vision-language models
    python tools/hf_support.py llama gemma2         some, printed only
    python tools/hf_support.py --write              all, and the tables put into docs/reference

Leaves nothing behind but, with --write, those files.
"""

import argparse
import sys
from pathlib import Path

import transformers
from hf_survey.architectures import surveyed, with_experts
from hf_survey.comparison import CONTEXT_LAYOUTS, EXPERT_LAYOUTS, LAYOUTS, TEXT_ALONE, VISION_LAYOUTS, Layout
from hf_survey.survey import survey
from hf_survey.table import make_table, put_between_markers
from hf_survey.vision import VISION_FAMILIES
from nxd_testing import RankPool

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", metavar="model_type", help="as transformers names them; all if none")
    parser.add_argument("--layout", action="append", metavar="NAME", help="such as 'PP 2'; all if none")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one architecture at one layout")
    parser.add_argument("--only", choices=("layers", "experts", "context", "vision"), help="one of the tables")
    parser.add_argument("--write", action="store_true", help="put the tables into their pages")
    options = parser.parse_args()
    surveys: list[tuple[str, list[str], tuple[Layout, ...]]] = [
        ("layers", surveyed(), LAYOUTS),
        ("experts", with_experts(), EXPERT_LAYOUTS),
        ("context", surveyed(), CONTEXT_LAYOUTS),
        ("vision", [f"{it}{rows}" for it in sorted(VISION_FAMILIES) for rows in ("", TEXT_ALONE)], VISION_LAYOUTS),
    ]
    failed = False
    with RankPool() as pool:
        for name, model_types, all_layouts in surveys:
            if options.only not in (None, name):
                continue
            chosen = [it for it in model_types if not options.model_types or it in options.model_types]
            layouts = [it for it in all_layouts if not options.layout or str(it) in options.layout]
            verdicts = []
            for verdict in survey(pool, chosen, layouts, options.timeout):
                verdicts.append(verdict)
                print(f"{verdict.model_type:24} {verdict.layout!s:18} {verdict.outcome:8} {verdict.reason}", flush=True)
            table = make_table(verdicts, layouts, transformers.__version__)
            if options.write:
                page = "vision-support.md" if name == "vision" else "hf-support.md"
                put_between_markers(REFERENCE / page, name, table)
            else:
                print("\n" + table)
            failed |= any(verdict.outcome in ("differs", "fails") for verdict in verdicts)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
