import threading
import traceback

import pytest
from nxd_data import read_ahead
from nxd_testing import deadline


@pytest.fixture(autouse=True)
def threads_left_behind():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.fixture
def made():
    return []


@pytest.fixture
def making(made):
    """`making(items)`: these, each noted in `made` when it is made."""

    def make(items):
        for item in items:
            made.append(item)
            yield item

    return make


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_items_come_in_their_order(making, depth, count):
    assert list(read_ahead(making(range(count)), depth)) == list(range(count))


def test_nothing_is_made_before_the_first_item_is_asked_for(making, made):
    items = read_ahead(making(range(9)), 2)

    assert made == []
    items.close()


def test_as_many_items_as_asked_for_are_made_ahead_and_no_more(making, made):
    third_is_made = threading.Event()

    def nine():
        for item in making(range(9)):
            if item == 2:
                third_is_made.set()
            yield item

    items = read_ahead(nine(), 2)
    assert next(items) == 0
    third_is_made.wait(timeout=deadline(60))
    items.close()

    assert made == [0, 1, 2]


def test_items_are_made_by_another_thread():
    [maker] = read_ahead((threading.current_thread() for _ in range(1)), 2)

    assert maker is not threading.current_thread()


def test_error_is_raised_at_its_items_turn_with_its_traceback(making):
    def damaged_page():
        raise OSError("page 2 is damaged")

    def pages():
        yield from making(range(2))
        damaged_page()

    items = read_ahead(pages(), 2)

    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(OSError, match="page 2 is damaged") as raised:
        next(items)
    assert "damaged_page" in [frame.name for frame in traceback.extract_tb(raised.tb)]


def test_closing_amid_the_items_ends_the_thread(making, made):
    items = read_ahead(making(iter(int, 1)), 2)  # without end
    next(items)

    items.close()

    assert len(made) <= 3
