"""The kind of a first difference, by what the numbers of a few recorded tensors say."""

import math

import pytest
import torch
from nxd_parity import compare, record
from nxd_parity.events import Placement

INITIAL, LOSS = ("parameter", "w", torch.linspace(1, 2, 30, dtype=torch.float64).view(5, 6) ** 3), 1.0
PAIRS = torch.arange(48).view(6, 4, 2)  # [rows, columns, 2]


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def first_of(tmp_path, monkeypatch):
    """`first_of(reference, *ranks)`: the first difference of tensors of one step, each (kind, name, values[, start]).

    Each side also records an initial parameter, or those of step 0 that it gives as "initial", and what lasts: a loss,
    which is another one if activations are given, and a parameter, which is another one if gradients of those are.
    """

    def write(side, rank, tensors, whole):
        monkeypatch.setenv("RANK", str(rank))
        with record(tmp_path / side, by_hand=True) as recorder:
            given = [("parameter", *it[1:]) for it in tensors if it[0] == "initial"]
            for kind, name, values, *start in given or [INITIAL]:
                tensor(recorder, kind, name, values, start, whole)
            for kind, name, values, *start in tensors:
                if kind not in ("initial", "parameter"):
                    tensor(recorder, kind, name, values, start, whole)
            kinds, apart = {it[0] for it in tensors}, side == "ranks"
            loss = torch.tensor(LOSS + (apart and bool(kinds & {"input", "activation"})), dtype=torch.float64)
            recorder.tensor("loss", "", loss, placement=Placement((), ()))
            recorder.end_step()
            for kind, name, values, *start in tensors:
                if kind == "parameter":
                    tensor(recorder, kind, name, values, start, whole)
            if "activation gradient" in kinds:
                tensor(recorder, *INITIAL[:2], INITIAL[2] + apart, [], whole)

    def tensor(recorder, kind, name, values, start, whole):
        shape = whole.get(name, tuple(values.shape))
        placement = Placement(shape, start[0] if start else (0,) * len(shape))
        recorder.tensor(kind, name, values, placement=placement)

    def find(reference, *ranks):
        whole = {it[1]: tuple(it[2].shape) for it in reference}
        write("one", 0, reference, whole)
        for rank, tensors in enumerate(ranks):
            write("ranks", rank, tensors, whole)
        report = compare(tmp_path / "one", tmp_path / "ranks")
        assert report.first is not None
        return report

    return find


def test_rows_in_another_order_are_an_order_though_ranks_have_columns(first_of):
    whole = drawn(6, 4, 8)
    other = whole.roll(3, 0)

    first = first_of(
        [("activation", "q", whole)],
        [("activation", "q", other[..., :4], (0, 0, 0))],
        [("activation", "q", other[..., 4:], (0, 0, 4))],
    ).first

    assert first.fault == "wrong shard or order"
    assert "along dim 0 positions 0..5 have the values of positions 3, 4, 5, 0, 1, 2" in first.detail


@pytest.mark.parametrize("share", [1.0, 0.5], ids=["all values", "half of the columns"])
def test_values_of_another_rank_are_an_order(first_of, share):
    whole = drawn(4, 8)
    found = torch.cat([whole[:2, : int(8 * share)], whole[2:, int(8 * share) :]], 1)
    found[:, 7] += 1.0  # and some are of no rank

    first = first_of(
        [("activation gradient", "x", whole)],
        [("activation gradient", "x", whole[:2], (0, 0))],
        [("activation gradient", "x", found, (2, 0))],
    ).first

    assert (first.fault, first.ranks) == ("wrong shard or order", (1,))
    assert "rank 1 has values that rank 0 should have" in first.detail


def test_rows_of_another_expert_are_an_order(first_of):
    tokens = [drawn(4, 3, seed=it) for it in range(2)]
    mixed = torch.cat([tokens[0][:2], tokens[1][:2]])

    first = first_of(
        [("input", "experts.0", tokens[0]), ("input", "experts.1", tokens[1])],
        [("input", "experts.0", mixed)],
        [("input", "experts.1", torch.cat([tokens[0][2:], tokens[1][2:]]))],
    ).first

    assert first.fault == "wrong shard or order"
    assert "its rows are those of experts.0, experts.1" in first.detail


def test_heads_in_another_order_show_at_the_first_position(first_of):
    whole = drawn(5, 4, 6)  # [sequence, batch, heads of 2 values]
    found = whole + drawn(5, 4, 6, seed=1)
    found[0] = whole[0][:, [0, 1, 4, 5, 2, 3]]

    first = first_of([("activation", "attention", whole)], [("activation", "attention", found)]).first

    assert first.fault == "wrong shard or order"
    assert "at position 0 of dim 0" in first.detail
    assert "0, 1, 4, 5, 2, 3" in first.detail


def test_gradient_that_is_zero_on_a_rank_is_dropped_tokens(first_of):
    whole = drawn(4, 8)

    first = first_of(
        [("activation gradient", "x", whole)],
        [("activation gradient", "x", whole[:2], (0, 0))],
        [("activation gradient", "x", torch.zeros(2, 8, dtype=torch.float64), (2, 0))],
    ).first

    assert (first.fault, first.detail, first.ranks) == ("dropped tokens", "all values of rank 1 are zero", (1,))


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (lambda old, step: old + 0.5 * step, "the update is 0.5 times the expected one, as with another learning rate"),
        (lambda old, step: 0.997 * old + step, "0.003 of the parameter is lost, as with other weight decay"),
    ],
    ids=["learning rate", "decay"],
)
def test_parameter_after_a_step_tells_the_update(first_of, change, detail):
    old, step = INITIAL[2], 0.01 * drawn(5, 6)

    first = first_of([("parameter", "w", old + step)], [("parameter", "w", change(old, step))]).first

    assert (first.kind, first.fault, first.detail) == ("parameter", "scaled", detail)


def test_initial_values_of_one_rank_are_random_numbers(first_of):
    report = first_of(
        [("initial", "w", drawn(5, 6))], [("initial", "w", drawn(5, 6))], [("initial", "w", drawn(5, 6, seed=1))]
    )

    assert (report.first.fault, report.first.ranks) == ("random numbers", (1,))
    assert "DIFFERENT  step 0, parameter, w: random numbers; rank 1 has other values than rank 0" in str(report)
    assert "; on rank 1\n" in str(report)


def test_shards_with_the_numbers_of_one_seed_are_random_numbers(first_of):
    ranks = [[("initial", "w", drawn(8, 6, seed=1), (0, 0))], [("initial", "w", drawn(7, 6, seed=1), (8, 0))]]

    first = first_of([("initial", "w", drawn(15, 6))], *ranks).first

    assert first.fault == "random numbers"
    assert "ranks 0, 1 have equal values, where each should have its own part" in first.detail


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_named_by_the_dtype_of_the_values(first_of, dtype):
    whole = drawn(64, 8)

    first = first_of([("activation", "x", whole)], [("activation", "x", whole.to(dtype).double())]).first

    assert first.fault == "lower precision"
    assert f"rounding to {str(dtype)[6:]}" in first.detail


def test_mask_on_a_term_is_random_numbers(first_of):
    term, rest = drawn(8, 16), drawn(8, 16, seed=1)
    masks = [(torch.rand(8, 16, generator=torch.Generator().manual_seed(it)) > 0.3) / 0.7 for it in range(2)]

    first = first_of(
        [("activation", "block.up", term), ("input", "block.norm", rest + masks[0] * term)],
        [("activation", "block.up", term), ("input", "block.norm", rest + masks[1] * term)],
    ).first

    assert first.fault == "random numbers"
    assert "block.up is added with another mask: some of its values times 1.429 more" in first.detail


@pytest.mark.parametrize("is_mask", [True, False])
def test_input_of_another_rank_is_named(first_of, is_mask):
    whole, given = drawn(4, 8), drawn(4, 8, seed=1)
    given = (given > 0).double() if is_mask else given
    out = whole * given
    wrong = torch.cat([out[:2], whole[2:] * given[:2]])

    first = first_of(
        [("input", "block", given), ("activation", "block", out)],
        [("input", "block", given[:2], (0, 0)), ("activation", "block", wrong[:2], (0, 0))],
        [("input", "block", given[:2], (0, 0)), ("activation", "block", wrong[2:], (2, 0))],
    ).first

    assert first.fault == ("random numbers" if is_mask else "different data")


@pytest.mark.parametrize(
    ("norm", "fault", "detail"),
    [
        (lambda a, b: a + b / 2, "missing sum", "the norm of the gradients that rank 0 has itself"),
        (lambda a, b: 2 * a + b, "summed twice", "count once for each rank"),
    ],
    ids=["of own shards", "of all ranks"],
)
def test_norm_tells_which_gradients_it_counts(first_of, norm, fault, detail):
    whole, half = drawn(6), torch.ones(8, dtype=torch.float64)
    squares = whole.square().sum(), half.square().sum()

    def with_norm(*gradients, of):
        return [*gradients, ("gradient norm", "", torch.tensor(math.sqrt(of), dtype=torch.float64))]

    report = first_of(
        with_norm(("gradient", "scale", whole), ("gradient", "weight", half), of=sum(squares)),
        *[
            with_norm(("gradient", "scale", whole), ("gradient", "weight", half[:4], (4 * it,)), of=norm(*squares))
            for it in range(2)
        ],
    )

    assert (report.first.kind, report.first.fault) == ("gradient norm", fault)
    assert detail in report.first.detail


def test_output_of_a_module_that_is_not_added_is_a_missing_term(first_of):
    branch, rest = drawn(4, 8), drawn(4, 8, seed=1)

    first = first_of(
        [("activation", "block.mlp", branch), ("activation", "block.norm", rest + branch)],
        [("activation", "block.mlp", branch), ("activation", "block.norm", rest)],
    ).first

    assert (first.name, first.fault) == ("block.norm", "missing term")
    assert first.detail == "the output of block.mlp is not in it"


def test_turned_pairs_are_wrong_positions(first_of):
    whole, angles = drawn(2, 5, 8), torch.arange(5, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    a, b = whole.chunk(2, -1)
    turned = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    first = first_of([("activation", "rotary", whole)], [("activation", "rotary", turned)]).first

    assert first.fault == "wrong positions"


def test_attention_of_which_only_the_last_position_agrees_lacks_a_mask(first_of):
    whole = drawn(2, 5, 8)
    found = whole + drawn(2, 5, 8, seed=1)
    found[:, -1] = whole[:, -1]

    first = first_of([("activation", "attention", whole)], [("activation", "attention", found)]).first

    assert (first.fault, "of dim 1 only the last position agrees" in first.detail) == ("wrong mask", True)


def test_gradient_that_an_earlier_one_is_added_to_is_stale(tmp_path):
    def train(folder, is_cleared):
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 4, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with record(folder):
            for _ in range(2):
                model(torch.randn(5, 6, dtype=torch.float64)).square().mean().backward()
                optimizer.step()
                if is_cleared:
                    optimizer.zero_grad()

    train(tmp_path / "one", True)
    train(tmp_path / "other", False)

    first = compare(tmp_path / "one", tmp_path / "other").first
    assert (first.step, first.kind, first.fault) == (2, "gradient", "stale values")
    assert "1 times the gradient of step 1 is in it" in first.detail


@pytest.mark.parametrize("factor", [1.0, 2.0], ids=["right", "of other gradients"])
def test_gradients_clipped_by_own_code_differ_only_if_the_optimizer_gets_others(tmp_path, factor):
    def train(folder, is_own):
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 4, dtype=torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with record(folder):
            model(torch.randn(5, 6, dtype=torch.float64)).square().mean().backward()
            if is_own:
                norm = torch.stack([it.grad.norm() for it in model.parameters()]).norm()
                for parameter in model.parameters():
                    parameter.grad *= factor * 0.1 / (norm + 1e-6)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    train(tmp_path / "one", False)
    train(tmp_path / "other", True)

    assert compare(tmp_path / "one", tmp_path / "other").agrees is (factor == 1.0)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize(
    ("times", "fault", "detail"),
    [(0, "missing term", "the bias is not added"), (2, "summed twice", "the bias is added 2 times")],
)
def test_bias_that_is_not_added_once_is_named(first_of, times, fault, detail, is_sharded):
    product, bias = drawn(4, 8), drawn(8, seed=1)
    right, found = product + bias, product + times * bias
    parts = [slice(0, 4), slice(4, 8)] if is_sharded else [slice(0, 8)]

    first = first_of(
        [("initial", "proj.bias", bias), ("activation", "proj", right)],
        *[
            [("initial", "proj.bias", bias[it], (it.start,)), ("activation", "proj", found[:, it], (0, it.start))]
            for it in parts
        ],
    ).first

    assert (first.name, first.fault, first.detail) == ("proj", fault, detail)


def test_rows_of_position_embeddings_are_named(first_of):
    tokens, rows = drawn(2, 6, 8), drawn(10, 8, seed=1)
    right, wrong = tokens + rows[:6], tokens[:, 3:] + rows[:3]
    initial = ("initial", "positions.weight", rows)

    first = first_of(
        [initial, ("activation", "positions", right)],
        [initial, ("activation", "positions", right[:, :3], (0, 0, 0))],
        [initial, ("activation", "positions", wrong, (0, 3, 0))],
    ).first

    assert (first.fault, first.ranks) == ("wrong positions", (1,))
    assert first.detail == "it adds rows 0, 1, 2 of positions.weight, not 3, 4, 5"


@pytest.mark.parametrize(
    ("is_first_alone", "fault", "detail"),
    [
        (
            True,
            "wrong shard or order",
            "at position 0 of dim 1 it has values of values at [0, 3, 0] and so on, not those",
        ),
        (False, "wrong mask", "at position 0 of dim 1 it has values of values alone, as where a sequence begins"),
    ],
    ids=["another token", "itself alone"],
)
def test_token_that_the_first_position_attends_to_is_named(first_of, is_first_alone, fault, detail):
    values = drawn(2, 5, 8)
    right, wrong = drawn(2, 5, 8, seed=1), drawn(2, 5, 8, seed=2)
    wrong[:, 0] = values[:, 3]
    if is_first_alone:
        right[:, 0] = values[:, 0]

    first = first_of(
        [("activation", "values", values), ("activation", "attention", right)],
        [("activation", "values", values), ("activation", "attention", wrong)],
    ).first

    assert (first.name, first.fault) == ("attention", fault)
    assert detail in first.detail
