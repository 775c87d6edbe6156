"""`compare_log_probs` by hand, with stale weights, and over ranks."""

import math
from itertools import pairwise

import nxd_state
import pytest
import torch
from nxd_layers import LogProbReport, compare_log_probs, token_log_probs
from nxd_testing import run_on_ranks


def test_report_of_known_ratios_is_what_is_computed_by_hand():
    rollout = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, float("nan"), -1.0]])
    ratios = torch.tensor([[1.0, 1.1, 0.7], [2.0, 1.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])

    report = compare_log_probs(rollout + ratios.log(), rollout, mask)

    logs = [0.0, math.log(1.1), math.log(0.7), math.log(2.0)]
    assert report.num_tokens == 4
    assert report.logp_difference_mean == pytest.approx(sum(map(abs, logs)) / 4, rel=1e-5)
    assert report.logp_difference_max == pytest.approx(math.log(2.0), rel=1e-5)
    assert report.k3_kl == pytest.approx((4.8 - 4 - sum(logs)) / 4, rel=1e-5)
    assert report.clip_fraction == 0.5  # 0.7 and 2.0
    assert compare_log_probs(rollout + ratios.log(), rollout, mask, epsilon=0.5).clip_fraction == 0.25


def test_older_weights_show_and_equal_ones_give_zeros():
    torch.manual_seed(0)
    hidden, head, update, tokens = torch.randn(64, 8), *torch.randn(2, 8, 32), torch.randint(0, 32, (64,))
    mask = torch.ones(64, dtype=torch.bool)

    def log_probs(steps):
        return token_log_probs(hidden @ (head + 0.05 * steps * update), tokens)

    reports = [compare_log_probs(log_probs(4), log_probs(4 - behind), mask) for behind in (0, 1, 4)]

    assert reports[0] == LogProbReport(num_tokens=64)
    for fewer, more in pairwise(reports):
        assert fewer.clip_fraction < more.clip_fraction
        assert fewer.k3_kl < more.k3_kl
        assert fewer.logp_difference_mean < more.logp_difference_mean


def on_two_ranks(fn):
    def job():
        nxd_state.initialize_model_parallel()
        return fn(nxd_state.get_data_parallel_rank())

    return run_on_ranks(job, 2)


def test_tokens_of_all_data_parallel_ranks_count():
    torch.manual_seed(0)
    trainer, rollout = torch.randn(2, 3, 4, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])

    def job(rank):
        rows = [slice(0, 2), slice(2, 3)][rank]
        return compare_log_probs(trainer[rows], rollout[rows], mask[rows])

    whole = compare_log_probs(trainer, rollout, mask)
    for report in on_two_ranks(job):
        assert vars(report) == pytest.approx(vars(whole))
    assert whole.num_tokens == 7


def test_no_tokens_anywhere_give_zeros():
    nothing = torch.empty(0, 4)

    assert compare_log_probs(nothing, nothing, nothing) == LogProbReport()
    assert compare_log_probs(*torch.randn(2, 3), torch.zeros(3)) == LogProbReport()


def test_wrong_shape_on_one_rank_is_an_error_on_all():
    def job(rank):
        with pytest.raises(RuntimeError) as error:
            compare_log_probs(torch.zeros(2, 4), torch.zeros(2, 3 + rank), torch.ones(2, 4))
        return str(error.value)

    first, second = on_two_ranks(job)

    assert first == second
    assert "rank 0: ValueError: log-probabilities of shapes [2, 4] and [2, 3] and a mask of shape [2, 4]" in first


def test_epsilon_of_zero_is_refused():
    with pytest.raises(RuntimeError, match="epsilon=0 is not positive"):
        compare_log_probs(torch.zeros(3), torch.zeros(3), torch.ones(3), epsilon=0)
