import itertools

from hypothesis import given
from hypothesis import strategies as st
from nxd_ckpt.boxes import Box, subtract, uncovered


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

    assert inner.relative_to(outer).slices() == (slice(1, 3), slice(2, 5))
