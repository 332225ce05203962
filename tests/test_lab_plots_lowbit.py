"""The picture of chapter 06: where the codes of a lane's words stand."""

import matplotlib
from matplotlib.colors import to_hex

from lab import plots

matplotlib.use("Agg")


def test_codes_stand_where_they_come_from_and_where_they_lie():
    words = {"word 0": [(0, 3), (9, 3)], "word 1": [(7, 100), (8, 101)]}
    above, below = plots.code_layout(words, "two words").axes
    assert above.get_title(loc="left") == "two words"
    whole, *codes = above.patches
    assert (whole.get_width(), whole.get_height()) == (128, 16)
    assert [(box.get_y(), box.get_x()) for box in codes] == [(0, 3), (9, 3), (7, 100), (8, 101)]
    fields = below.patches
    assert [(box.get_x(), box.get_width()) for box in fields] == 2 * [(16, 16), (0, 16)]  # the lowest bits on the right
    assert [round(box.get_y()) for box in fields] == [0, 0, 1, 1]
    lower, upper = to_hex(codes[0].get_facecolor()), to_hex(codes[1].get_facecolor())
    assert [to_hex(box.get_facecolor()) for box in codes] == [lower, upper, lower, upper] and lower != upper
    assert [to_hex(box.get_facecolor()) for box in fields] == [lower, upper, lower, upper]
    said = [text.get_text() for text in below.texts]
    assert [text for text in said if "," in text] == ["0,3", "9,3", "7,100", "8,101"]
    assert said[-4:] == ["0", "8", "16", "24"] and {"word 0", "word 1"} <= set(said)
