import pytest
from nxd_trainer.report.thumbnails import HEIGHT, WIDTH, thumbnail
from rich.color import Color

image = pytest.importorskip("PIL.Image", reason="images need Pillow: pip install 'nxd-trainer[vision]'")


def test_two_pixels_are_in_each_character():
    picture = image.new("RGB", (2, 3))
    for place, color in {(0, 0): (255, 0, 0), (1, 0): (0, 0, 255), (0, 1): (0, 255, 0), (1, 2): (9, 8, 7)}.items():
        picture.putpixel(place, color)

    shown = thumbnail(picture)

    assert shown.plain == "▀▀\n▀▀"
    colors = [(span.style.color, span.style.bgcolor) for span in shown.spans if span.style]
    red, green, blue, black = (Color.from_rgb(*it) for it in ((255, 0, 0), (0, 255, 0), (0, 0, 255), (0, 0, 0)))
    assert colors == [(red, green), (blue, black), (black, None), (Color.from_rgb(9, 8, 7), None)]


@pytest.mark.parametrize("size", [(1, 1), (4000, 300), (10, 900), (640, 480)])
def test_picture_fits_into_a_few_lines(size):
    lines = thumbnail(image.new("RGB", size)).plain.split("\n")

    assert len(lines) <= HEIGHT // 2
    assert {len(line) for line in lines} <= set(range(1, WIDTH + 1))
