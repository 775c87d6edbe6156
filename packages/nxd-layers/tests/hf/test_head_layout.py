"""Where heads lie: each model's head once per copy, and every query head beside its key and value head."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nxd_layers.hf.head_layout import smallest_head_layout
from nxd_state import check_shard_specs


@given(key_value_heads=st.integers(1, 12), group=st.integers(1, 9), tp=st.integers(1, 8), head_size=st.integers(1, 3))
def test_every_query_head_lies_once_beside_its_key_and_value_head(key_value_heads, group, tp, head_size):
    layout = smallest_head_layout(key_value_heads * group, key_value_heads, tp)
    key_value = layout.key_value_layout(head_size)
    seen = []
    for rank in range(tp):
        queries, keys = layout.query_heads_of(rank), key_value.heads_of(rank)
        assert (len(queries), len(keys)) == (layout.heads_per_rank, layout.key_value_heads_per_rank)
        for slot, head in enumerate(queries):
            if head is not None:
                assert keys[slot // layout.queries_per_copy] == head // group
                seen.append(head)
    assert sorted(seen) == list(range(key_value_heads * group))


@given(key_value_heads=st.integers(1, 12), group=st.integers(1, 9), tp=st.integers(1, 8), head_size=st.integers(1, 3))
def test_parts_of_all_ranks_make_the_whole_weights(key_value_heads, group, tp, head_size):
    num_heads = key_value_heads * group
    layout = smallest_head_layout(num_heads, key_value_heads, tp)
    for shape, dim in [((num_heads * head_size, 5), 0), ((5, num_heads * head_size), 1), ((num_heads * head_size,), 0)]:
        check_shard_specs([layout.query_spec(shape, dim, rank) for rank in range(tp)])
    key_value = layout.key_value_layout(head_size)
    check_shard_specs([key_value.spec(rank, (5,), "") for rank in range(tp)])


@pytest.mark.parametrize(
    ("num_heads", "key_value_heads", "tp", "heads_per_rank", "key_value_heads_per_rank"),
    [
        (8, 4, 2, 4, 2),  # equal runs
        (8, 2, 4, 2, 1),  # copies
        (3, 3, 2, 2, 2),  # a head of zeros
        (6, 3, 2, 3, 3),  # copies: fewer heads than with a fourth group of zeros
        (14, 2, 4, 4, 1),  # both: copies of two groups of seven, each filled up to eight
        (7, 1, 2, 4, 1),
    ],
)
def test_layout_with_the_fewest_heads_is_chosen(
    num_heads, key_value_heads, tp, heads_per_rank, key_value_heads_per_rank
):
    layout = smallest_head_layout(num_heads, key_value_heads, tp)

    assert (layout.heads_per_rank, layout.key_value_heads_per_rank) == (heads_per_rank, key_value_heads_per_rank)


def test_heads_that_are_not_grouped_evenly_are_refused():
    with pytest.raises(ValueError, match="3 key/value heads do not divide 8 query heads"):
        smallest_head_layout(8, 3, 2)
