"""The colors of page.css in light and dark mode."""

import re
from importlib.resources import files
from itertools import combinations
from math import dist

import pytest

STYLE = files("paddock.dashboard").joinpath("page.css").read_text()
LIGHT, DARK = STYLE.split("prefers-color-scheme: dark", maxsplit=1)
# Color vision deficiencies on linear red, green, blue (Machado et al. 2009).
EYES = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no long": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "no middle": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "no short": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def colours(text):
    block = text[text.index("--paper") :]
    return dict(re.findall(r"--(\w+): #(\w{6})", block[: block.index("}")]))


def linear(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def contrast(one, other):
    """The contrast ratio of WCAG."""

    def luminance(colour):
        red, green, blue = linear(colour)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def seen(colour, eye):
    """The color in CIE Lab, where equal distances look equal."""
    rgb = [sum(m * p for m, p in zip(row, linear(colour), strict=True)) for row in eye]
    r, g, b = (min(1.0, max(0.0, part)) for part in rgb)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("text", [LIGHT, DARK], ids=["day", "night"])
def test_text_and_lines_have_enough_contrast(text):
    found = colours(text)
    for name in ("ink", "soft", "good", "warn", "bad"):
        assert contrast(found[name], found["paper"]) >= 4.5, name
    for name in ("c0", "c1", "c2", "c3", "heat"):
        assert contrast(found[name], found["paper"]) >= 3, name


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("text", [LIGHT, DARK], ids=["day", "night"])
def test_curves_are_distinguishable_with_color_vision_deficiencies(text, eye):
    found = colours(text)
    for one, other in combinations(("c0", "c1", "c2", "c3"), 2):
        assert dist(seen(found[one], EYES[eye]), seen(found[other], EYES[eye])) > 11, (one, other)
