"""Every architecture at every layout, each in a job of its own: a crash or a hang is then one line of the table."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxd_testing import RankFailure, RankPool

from hf_survey.comparison import Layout, Step, compare, one_process, one_rank

LONGEST_REASON = 300


@dataclass(frozen=True)
class Verdict:
    """What came of one architecture at one layout.

    Attributes:
        outcome: "pass", "refused" by our packages with an error, "differs" in numbers, or "fails" with another
            error. Of one that does not run in one process, "unknown".
        reason: why, unless it passes.
    """

    model_type: str
    layout: Layout
    outcome: str
    reason: str = ""


def survey(pool: RankPool, model_types: Sequence[str], layouts: Sequence[Layout], timeout: float) -> Iterator[Verdict]:
    """The verdicts, one after the other.

    Args:
        pool: its processes are used again and again.
        model_types: as transformers names them.
        layouts: at which ones.
        timeout: seconds for one architecture at one layout.
    """
    for model_type in model_types:
        try:
            expected = pool.run(one_process, 1, model_type, timeout=timeout)[0]
        except RankFailure as failure:
            for layout in layouts:
                yield Verdict(model_type, layout, "unknown", f"does not run in one process: {_cause(failure)}")
            continue
        for layout in layouts:
            yield judge(pool.run, model_type, layout, expected, timeout)


def judge(
    run_ranks: Callable[..., list[Step]],
    model_type: str,
    layout: Layout,
    expected: Step,
    timeout: float,
    changes: Mapping[str, Any] | None = None,
) -> Verdict:
    """The verdict on one architecture at one layout, with these keys of its config changed."""
    try:
        ranks = run_ranks(one_rank, layout.num_ranks, model_type, layout, changes or {}, timeout=timeout)
    except RankFailure as failure:
        return Verdict(model_type, layout, "refused" if _is_refusal(failure) else "fails", _cause(failure))
    refusals = [step.refusal for step in ranks]
    if all(refusals):
        return Verdict(model_type, layout, "refused", refusals[0])
    if any(refusals):
        return Verdict(model_type, layout, "fails", f"refused on some ranks only: {next(filter(None, refusals))}")
    difference = compare(expected, ranks)
    return Verdict(model_type, layout, "differs" if difference else "pass", difference)


def _cause(failure: RankFailure) -> str:
    first = next(iter(failure.failures.values()))  # the root cause comes first
    summary = first.summary.strip().splitlines()[0]
    return summary.removeprefix("ValueError: ") if len(summary) < LONGEST_REASON else f"{summary[:LONGEST_REASON]}..."


def _is_refusal(failure: RankFailure) -> bool:
    """Whether it is an error that one of our packages raised itself: the last frame is a `raise` in a file of ours."""
    lines = next(iter(failure.failures.values())).traceback.splitlines()
    frames = [index for index, line in enumerate(lines) if line.lstrip().startswith("File ")]
    if not frames:
        return False
    file, source = lines[frames[-1]], lines[frames[-1] + 1] if frames[-1] + 1 < len(lines) else ""
    return "/nxd_" in file and source.strip().startswith("raise ")
