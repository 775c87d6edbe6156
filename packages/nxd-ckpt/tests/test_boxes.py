import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nxd_ckpt.boxes import Box, boxes_of_range, subtract, uncovered


@st.composite
def boxes_of_one_tensor(draw, count):
    num_dims = draw(st.integers(0, 3))
    boxes = []
    for _ in range(count):
        offsets = tuple(draw(st.integers(0, 4)) for _ in range(num_dims))
        boxes.append(Box(offsets, tuple(draw(st.integers(0, 4)) for _ in range(num_dims))))
    return boxes


def elements(box):
    return set(itertools.product(*(range(a, b) for a, b in zip(box.offsets, box.ends, strict=True))))


@given(boxes_of_one_tensor(2))
def test_intersect_two_boxes_holds_the_common_elements(boxes):
    common = boxes[0].intersect(boxes[1])

    assert (elements(common) if common else set()) == elements(boxes[0]) & elements(boxes[1])


@given(boxes_of_one_tensor(2))
def test_subtract_a_hole_leaves_each_other_element_once(boxes):
    rest = subtract(boxes[0], boxes[1])

    found = [element for box in rest for element in elements(box)]
    assert sorted(found) == sorted(elements(boxes[0]) - elements(boxes[1]))


@given(boxes_of_one_tensor(4))
def test_uncovered_several_covers_leaves_what_none_of_them_holds(boxes):
    rest = uncovered(boxes[0], boxes[1:])

    found = [element for box in rest for element in elements(box)]
    assert sorted(found) == sorted(elements(boxes[0]).difference(*map(elements, boxes[1:])))


def test_slices_of_a_relative_box_pick_its_elements():
    outer, inner = Box((10, 20), (4, 6)), Box((11, 22), (2, 3))

    assert inner.relative_to(outer).slices == (slice(1, 3), slice(2, 5))


@pytest.mark.parametrize("gap", [0, 1, 3, 7])
def test_uncovered_one_missing_row_is_found(gap):
    slabs = [Box((row, 0), (1, 5)) for row in range(8) if row != gap]

    assert uncovered(Box.whole((8, 5)), slabs) == [Box((gap, 0), (1, 5))]


def test_uncovered_overlapping_slabs_and_inner_boxes_cover():
    whole = Box((2, 1), (6, 4))

    assert uncovered(whole, [Box((0, 1), (5, 4)), Box((4, 1), (9, 4))]) == []
    assert uncovered(whole, [Box((2, 1), (6, 2)), Box((2, 3), (6, 2))]) == []


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (1, 5, 1), (4, 0, 2)])
def test_boxes_of_range_are_the_elements_in_order(shape):
    count = math.prod(shape)
    numbers = torch.arange(count).reshape(shape)

    for start in range(count + 1):
        for stop in range(start, count + 1):
            boxes = list(boxes_of_range(shape, start, stop))
            found = [number for box in boxes for number in numbers[box.slices].flatten().tolist()]
            assert found == list(range(start, stop))
