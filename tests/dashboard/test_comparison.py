import json

import pytest

from paddock.dashboard import write_comparison
from paddock.dashboard.run_view import ReportError
from tests.dashboard.runs import body, of_class, points, words, write_run


def arm(folder, name, ends, *, lr=0.1, steps=4, **options):
    return [
        write_run(
            folder / f"{name}-{seed}",
            [8.0 + seed, 4.0, 2.0, end][:steps],
            seed=seed,
            lr=lr,
            held_out={2: end + 1, steps: end},
            **options,
        )
        for seed, end in enumerate(ends)
    ]


def compared(tmp_path, arms, **options):
    return body(write_comparison(arms, tmp_path / "page.html", **options))


def charts(main):
    found = [json.loads(f.get("data-chart")) for f in main.iter("figure") if f.get("data-chart")]
    return {series["name"]: series for series in found[0]["series"]}


def test_arms_show_mean_and_range_over_seeds_and_every_seed(tmp_path):
    arms = {"split": arm(tmp_path, "s", [1.0, 1.2]), "whole": arm(tmp_path, "w", [2.0, 2.4])}
    main = compared(tmp_path, arms)
    split, whole = charts(main)["split"], charts(main)["whole"]
    assert (split["x"], split["y"]) == ([200, 400], pytest.approx([2.1, 1.1]))
    assert (whole["low"], whole["high"]) == ([3.0, 2.0], [3.4, 2.4])
    assert [len(points(dots)) for dots in of_class(of_class(main, "rows")[0], "dots")] == [2, 2]
    assert "1.10 ± 0.14" in words(main)
    rows = [words(row) for row in main.iter("tr")]
    # 1.1 apart; the standard error is sqrt(0.02 / 2 + 0.08 / 2)
    assert "whole 2.20 ± 0.28 +1.1000 4.9" in rows


def test_the_settings_that_differ_are_named(tmp_path):
    arms = {"slow": arm(tmp_path, "a", [1.0], lr=0.1), "fast": arm(tmp_path, "b", [1.0], lr=0.3)}
    main = compared(tmp_path, arms)
    rows = [words(row) for row in main.iter("tr")]
    assert "optim.lr 0.1 0.3" in rows
    assert not [row for row in rows if row.startswith(("seed", "steps", "stage"))]


def test_unequal_token_counts_are_reported(tmp_path):
    arms = {"long": arm(tmp_path, "a", [1.0]), "short": arm(tmp_path, "b", [1.0], steps=3)}
    assert "trained on different numbers of tokens: long 400, short 300" in words(
        compared(tmp_path, arms)
    )


def test_equal_tokens_need_no_note(tmp_path):
    arms = {"a": arm(tmp_path, "a", [1.0, 2.0]), "b": arm(tmp_path, "b", [1.0])}
    assert not of_class(compared(tmp_path, arms), "note")


def test_an_unfinished_run_is_reported_and_truncates_its_arm(tmp_path):
    whole = write_run(tmp_path / "whole", [4.0, 3.0, 2.0], seed=0)
    killed = write_run(tmp_path / "killed", [6.0, 5.0], seed=1, steps=3)
    other = write_run(tmp_path / "other", [1.0, 1.0, 1.0])
    main = compared(tmp_path, {"arm": [whole, killed], "other": [other]}, metric="loss")
    assert "is at step 2 of 3" in words(main)
    assert charts(main)["arm"]["y"] == [5.0, 4.0]


def test_seeds_that_differ_in_other_settings_are_reported(tmp_path):
    mixed = arm(tmp_path, "a", [1.0], lr=0.1) + arm(tmp_path, "b", [1.0], lr=0.3)
    main = compared(tmp_path, {"mixed": mixed})
    assert "the runs of mixed differ in optim.lr" in words(main)


def test_a_diverged_seed_is_shown(tmp_path):
    arms = {"a": arm(tmp_path, "a", [1.0, float("nan")]), "b": arm(tmp_path, "b", [2.0, 2.0])}
    main = compared(tmp_path, arms)
    assert "1 (1 of 2 not finite)" in words(main)
    assert "not finite" in [cell.text for cell in main.iter("td")]


def test_names_are_escaped(tmp_path):
    arms = {"<b>x</b>": arm(tmp_path, "a", [1.0]), "y": arm(tmp_path, "b", [1.0])}
    main = compared(tmp_path, arms)
    assert "<b>x</b>" in words(main.find("h1"))
    assert not list(main.find("h1"))


@pytest.mark.parametrize(
    ("names", "metric", "message"),
    [
        ({"a": 1}, None, "at least two runs"),
        ({"a": 2, "b": 0}, None, "every arm at least one"),
        ({"a": 2}, "reward", "metric 'reward' not found; metrics: loss, lr, val_loss"),
    ],
)
def test_runs_that_cannot_be_compared_are_rejected(tmp_path, names, metric, message):
    arms = {name: arm(tmp_path, name, [1.0] * count) for name, count in names.items()}
    with pytest.raises(ReportError, match=message):
        write_comparison(arms, tmp_path / "page.html", metric=metric)
    assert not (tmp_path / "page.html").exists()
