from pathlib import Path

import pytest

from paddock.config import ConfigError, load_recipe


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
        return name

    return write


def test_a_recipe_is_a_diff_to_what_it_extends(write):
    write("nano/base.toml", "name = 'base'\nlayers = [1, 2, 3]\n[optim]\nlr = 1.0\nsteps = 10")
    write("big/x.toml", "extends = '../nano/base.toml'\nlayers = [4]\n[optim]\nlr = 2.0")
    assert load_recipe("big/x.toml").values == {
        "name": "base",
        "layers": [4],
        "optim": {"lr": 2.0, "steps": 10},
    }


def test_each_key_records_the_file_that_set_it_last(write):
    write("nano/base.toml", "[optim]\nlr = 1.0\nsteps = 10")
    write("big/x.toml", "extends = '../nano/base.toml'\n[optim]\nlr = 2.0")
    origins = load_recipe("big/x.toml", ["data.seed=1"]).origins
    assert origins["optim", "steps"] == "nano/base.toml"
    assert origins["optim", "lr"] == "big/x.toml"
    assert origins["data", "seed"] == "--set"


def test_of_several_parents_the_right_one_wins_and_the_file_itself_wins_over_both(write):
    write("a.toml", "x = 1\ny = 1\nz = 1")
    write("b.toml", "y = 2\nz = 2")
    assert load_recipe(write("c.toml", "extends = ['a.toml', 'b.toml']\nz = 3")).values == {
        "x": 1,
        "y": 2,
        "z": 3,
    }


def test_two_parents_may_share_a_grandparent(write):
    write("base.toml", "x = 1")
    write("a.toml", "extends = 'base.toml'\ny = 1")
    write("b.toml", "extends = 'base.toml'\ny = 2")
    assert load_recipe(write("c.toml", "extends = ['a.toml', 'b.toml']")).values == {"x": 1, "y": 2}


def test_a_circular_extends_is_named_in_full(write):
    write("a.toml", "extends = 'sub/b.toml'")
    write("sub/b.toml", "extends = '../a.toml'")
    with pytest.raises(ConfigError, match=r"each other: a\.toml -> sub/b\.toml -> a\.toml$"):
        load_recipe("a.toml")


def test_a_missing_file_is_named_with_the_file_that_extends_it(write):
    write("a.toml", "extends = 'sub/nope.toml'")
    with pytest.raises(ConfigError, match=r"cannot read recipe sub/nope\.toml, which a\.toml ext"):
        load_recipe("a.toml")
    with pytest.raises(ConfigError, match=r"cannot read recipe none\.toml: No such file"):
        load_recipe("none.toml")


def test_broken_toml_is_named_by_file_and_line(write):
    with pytest.raises(ConfigError, match=r"a\.toml is not TOML: .*line 2"):
        load_recipe(write("a.toml", "x = 1\ny = = 2"))
    Path("latin.toml").write_bytes(b"x = '\xe9'")
    with pytest.raises(ConfigError, match=r"latin\.toml is not TOML"):
        load_recipe("latin.toml")


def test_extends_must_be_a_path_or_paths(write):
    with pytest.raises(ConfigError, match=r"'extends' in a\.toml must be a path"):
        load_recipe(write("a.toml", "extends = 3"))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("x=3", {"x": 3}),
        ("x=3.5", {"x": 3.5}),
        ("x=true", {"x": True}),
        ("x=inf", {"x": float("inf")}),
        ("x=[1, 2]", {"x": [1, 2]}),
        ("x.y={z = 1}", {"x": {"y": {"z": 1}}}),
        ("x=word", {"x": "word"}),
        ("x=runs/a=b.toml", {"x": "runs/a=b.toml"}),
        ('x="3"', {"x": "3"}),
        ('x=say "hi" \\o/', {"x": 'say "hi" \\o/'}),
        ("x=", {"x": ""}),
        ("x=#1", {"x": "#1"}),
        ('mix."math v1.2"=3', {"mix": {"math v1.2": 3}}),
    ],
)
def test_a_set_value_is_parsed_as_toml_or_kept_as_text(write, text, values):
    assert load_recipe(write("a.toml", ""), [text]).values == values


@pytest.mark.parametrize("text", ["x", "", "=3", "x y=3", "x..y=3"])
def test_a_set_without_key_and_value_is_rejected(write, text):
    with pytest.raises(ConfigError, match=r"--set .*: expected a setting and its value"):
        load_recipe(write("a.toml", ""), [text])


def test_the_last_set_wins_and_sets_reach_into_tables(write):
    recipe = load_recipe(write("a.toml", "[a]\nb = 1\nc = 1"), ["a.b=2", "a.b=3"])
    assert recipe.values == {"a": {"b": 3, "c": 1}}
