import json
from xml.etree import ElementTree

import pytest

from paddock.dashboard.bar_charts import heat_map, seed_plot, stacked_bar
from paddock.dashboard.charts import ChartAxis, ReferenceLine, line_chart
from paddock.dashboard.series import MetricSeries
from tests.dashboard.runs import of_class, points, words

NAN = float("nan")


def drawn(*series, y=ChartAxis("nats"), x=ChartAxis("tokens", zero=True), **options):  # noqa: B008
    return ElementTree.fromstring(line_chart("Loss", series, x=x, y=y, **options))


def line(y, x=None, **options):
    return MetricSeries(name=options.pop("name", "loss"), x=x or range(len(y)), y=y, **options)


def only(figure, name):
    (found,) = [path for path in of_class(figure, name) if path.tag == "path"]
    return found


def percents(figure, side):
    (box,) = of_class(figure, f"{side}-ticks")
    return {span.text: float(span.get("style").split(":")[1].rstrip("%")) for span in box}


def test_points_are_placed_by_the_axes():
    figure = drawn(line([0.0, 4.0, 10.0], x=[0, 50, 200]), y=ChartAxis("nats", zero=True))
    (piece,) = points(only(figure, "line"))
    across, upwards = percents(figure, "x"), percents(figure, "y")
    assert (across["0"], across["200"], upwards["0"]) == (0, 100, 0)
    wanted = [(across["0"], upwards["0"]), (across["50"], upwards["4"]), (100, upwards["10"])]
    for (x, y), (percent_x, percent_y) in zip(piece, wanted, strict=True):
        assert (x, 1000 - y) == pytest.approx((10 * percent_x, 10 * percent_y), abs=0.2)


def test_a_logarithmic_axis_gives_equal_space_to_equal_ratios():
    figure = drawn(line([1.0, 10.0, 100.0]), y=ChartAxis("norm", log=True))
    (piece,) = points(only(figure, "line"))
    (_, bottom), (_, middle), (_, top) = piece
    assert bottom - middle == pytest.approx(middle - top, abs=0.2)
    marks = percents(figure, "y")
    assert 1000 - 10 * marks["10"] == pytest.approx(middle, abs=0.2)


def test_grid_lines_and_labels_agree():
    figure = drawn(line([0.3, 2.6]))
    grid = (only(figure, "grid").get("d") or "").split("M")[1:]
    rows = sorted(1000 - float(row.split("H")[0].split()[1]) for row in grid if "H" in row)
    assert rows == pytest.approx(sorted(10 * p for p in percents(figure, "y").values()), abs=0.2)


def test_a_non_finite_value_leaves_a_gap_and_is_reported():
    figure = drawn(line([1.0, 2.0, NAN, 3.0, float("inf"), 2.0], step=[1, 2, 3, 4, 5, 6]))
    assert [len(piece) for piece in points(only(figure, "line"))] == [2, 1, 1]
    assert only(figure, "line").get("d").endswith("h0")  # a single point is still visible
    assert "Not shown: loss NaN at 3 and 1 more." in words(figure)


def test_zero_on_a_logarithmic_axis_is_left_out_and_reported():
    figure = drawn(line([0.0, 1.0, 10.0]), y=ChartAxis("norm", log=True))
    assert [len(piece) for piece in points(only(figure, "line"))] == [2]
    assert "Not shown: loss 0 at 0." in words(figure)


@pytest.mark.parametrize("y", [[], [NAN, NAN], [3.0], [2.0, 2.0], [0.0], [-1.0, -2.0]])
@pytest.mark.parametrize("log", [False, True])
def test_any_values_can_be_drawn(y, log):
    figure = drawn(line(y), y=ChartAxis("nats", log=log))
    places = [place for piece in points(only(figure, "line")) for place in piece]
    assert all(-0.1 <= number <= 1000.1 for place in places for number in place)


def test_a_spike_survives_a_hundred_thousand_steps():
    values = [1.0] * 100_000
    values[54_321] = 9.0
    figure = drawn(line(values), smooth=1000)
    raw = [place for piece in points(only(figure, "raw")) for place in piece]
    assert len(raw) < 2000
    assert min(height for _, height in raw) < 100  # up is smaller
    assert len(json.dumps(json.loads(figure.get("data-chart")))) < 100_000


def test_the_average_is_drawn_over_the_single_steps():
    figure = drawn(line([0.0, 10.0] * 50), smooth=20)
    heights = [height for piece in points(only(figure, "smooth")) for _, height in piece]
    assert max(heights[20:]) - min(heights[20:]) < 150
    assert len(points(only(figure, "raw"))[0]) == 100


def test_sparse_measurements_are_not_averaged():
    figure = drawn(line([1.0, 2.0] * 20, marks=True), smooth=9)
    assert not of_class(figure, "smooth")
    assert len(points(only(figure, "dots"))) == 40


def test_a_reference_line_is_inside_the_chart_and_labelled():
    figure = drawn(line([1.0, 2.0]), rules=[ReferenceLine("unigram entropy", 8.0)])
    start, _ = only(figure, "rule").get("d").split("H")
    height = float(start.split()[1])
    (name,) = [span for span in of_class(figure, "rule") if span.tag == "span"]
    assert name.text == "unigram entropy 8"
    assert 0 < height < 200
    assert float(name.get("style").removeprefix("top:").rstrip("%")) * 10 == pytest.approx(height)


def test_a_band_is_a_closed_path():
    figure = drawn(line([2.0, 3.0], low=[1.0, 2.0], high=[4.0, 5.0]))
    (shape,) = points(only(figure, "band"))
    (piece,) = points(only(figure, "line"))
    assert [x for x, _ in shape] == [0.0, 1000.0, 1000.0, 0.0]
    assert shape[0][1] > piece[0][1] > shape[3][1]  # lower values have a larger y


def test_the_readout_matches_the_drawing():
    figure = drawn(line([1.0, NAN, 3.0], x=[10, 20, 40], step=[1, 2, 3]), line([5.0], name="b"))
    chart = json.loads(figure.get("data-chart"))
    assert chart["label"] == "tokens"
    assert chart["x"][:2] == [0, 40]
    first, second = chart["series"]
    assert first["x"] == [10, 20, 40] and first["y"] == [1, None, 3] and first["step"] == [1, 2, 3]
    assert first["colour"] != second["colour"]


def test_a_chart_has_an_aria_label():
    (drawing,) = drawn(line([7.0, 0.5, 0.6]), rules=[ReferenceLine("unigram entropy", 4.3)]).iter(
        "svg"
    )
    aria_label = drawing.get("aria-label")
    assert aria_label == (
        "Loss: loss from 7 at 0 tokens to 0.6 at 2, lowest 0.5, highest 7; unigram entropy 4.3."
    )


def test_seeds_share_one_axis_with_their_mean():
    figure = ElementTree.fromstring(
        seed_plot("Loss", {"split": [1.0, 3.0], "whole": [2.0, NAN]}, label="nats")
    )
    split, whole = [points(path) for path in of_class(figure, "dots")]
    assert len(split) == 2 and len(whole) == 1
    (mean,) = [p.get("d") for p in of_class(figure, "mean")][:1]
    middle = (split[0][0][0] + split[1][0][0]) / 2
    assert float(mean[1:].split()[0]) == pytest.approx(middle, abs=0.1)
    assert whole[0][0][0] == pytest.approx(middle, abs=0.1)
    assert "2.0 ± 1.4" in words(figure) and "2 (1 of 2 not finite)" in words(figure)


def test_columns_begin_at_zero():
    figure = ElementTree.fromstring(
        seed_plot("x", {"a": [4.0], "b": [8.0]}, label="", from_zero=True)
    )
    a, b = [path.get("d") for path in of_class(figure, "bar")]
    assert a.startswith("M0.0 ") and b.startswith("M0.0 ")
    assert percents(figure, "x")["0"] == 0
    lengths = [float(d.split("H")[1].split("V")[0]) - float(d[1:].split()[0]) for d in (a, b)]
    assert lengths[1] == pytest.approx(2 * lengths[0], abs=0.2)


def test_a_heat_map_shows_and_shades_every_number():
    figure = ElementTree.fromstring(
        heat_map("skills", ["base", "rl"], ["sums", "search"], [[0.1, None], [1.5, NAN]])
    )
    cells = {cell.text: cell.get("style") for cell in figure.iter("td") if cell.text}
    assert cells == {"0.1": "--level:0.100", "-": None, "1.5": "--level:1.000", "NaN": None}


def test_a_heat_map_may_have_another_range():
    figure = ElementTree.fromstring(
        heat_map("x", ["a"], ["b", "c"], [[30.0, 20.0]], low=20, high=40)
    )
    assert [cell.get("style") for cell in figure.iter("td") if cell.text] == [
        "--level:0.500",
        "--level:0.000",
    ]


def test_shares_add_up():
    figure = ElementTree.fromstring(
        stacked_bar({"steps": 30.0, "saving": 10.0}, lambda s: f"{s:.0f} s")
    )
    assert [piece.get("style") for piece in of_class(figure, "share")[0]] == [
        "width:75.00%",
        "width:25.00%",
    ]
    assert "steps 30 s (75%)" in words(figure)


@pytest.mark.parametrize("name", ['<script>alert("x")</script>', "a & b's", '" onload="x'])
def test_names_are_escaped(name):
    series = [line([1.0, 2.0], name=name), line([1.0, 2.0], name="other")]
    page = line_chart(
        name, series, x=ChartAxis(name), y=ChartAxis(name), rules=[ReferenceLine(name, 1.5)]
    )
    page += seed_plot(name, {name: [1.0]}, label=name) + heat_map(name, [name], [name], [[1.0]])
    figure = ElementTree.fromstring(f"<main>{page}</main>")
    assert not list(figure.iter("script"))
    assert not [e for e in figure.iter() if "onload" in e.attrib]
    assert name in words(figure) or " ".join(name.split()) in words(figure)
    assert json.loads(figure[0].get("data-chart"))["series"][0]["name"] == name
