"""Which architectures of transformers train in parallel with the numbers of one process: makes the table of the docs.

Every text decoder that has a tensor-parallel plan is shrunk to a few thousand parameters and takes one step at TP
2, PP 2 and TP 2 x PP 2; loss and all gradients are compared with one process in float64, to a relative 1e-10. An
architecture passes, is refused by our packages with the reason, or differs.

    python tools/hf_support.py                      all architectures: ten minutes or so on two cores
    python tools/hf_support.py llama gemma2         some, printed only
    python tools/hf_support.py --write              all, and the table put into docs/hf-support.md

Leaves nothing behind but, with --write, that file.
"""

import argparse
import sys
from pathlib import Path

import transformers
from hf_survey.architectures import surveyed
from hf_survey.comparison import LAYOUTS
from hf_survey.survey import survey
from hf_survey.table import make_table, put_between_markers
from nxd_state.testing import RankPool

DOCUMENT = Path(__file__).parents[1] / "docs" / "hf-support.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", metavar="model_type", help="as transformers names them; all if none")
    parser.add_argument("--layout", action="append", metavar="NAME", help="such as 'PP 2'; all if none")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one architecture at one layout")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.name}")
    options = parser.parse_args()
    layouts = [layout for layout in LAYOUTS if not options.layout or str(layout) in options.layout]
    verdicts = []
    with RankPool() as pool:
        for verdict in survey(pool, options.model_types or surveyed(), layouts, options.timeout):
            verdicts.append(verdict)
            print(f"{verdict.model_type:24} {verdict.layout!s:12} {verdict.outcome:8} {verdict.reason}", flush=True)
    table = make_table(verdicts, layouts, transformers.__version__)
    if options.write:
        put_between_markers(DOCUMENT, table)
    else:
        print("\n" + table)
    return 1 if any(verdict.outcome in ("differs", "fails") for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
