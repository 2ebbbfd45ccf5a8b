from collections.abc import Mapping
from typing import Annotated, Literal

import pytest
from pydantic import Field, model_validator

from paddock.config import BaseSettings, ConfigError, Recipe, load_recipe, resolve


class Optim(BaseSettings):
    lr: float = Field(3e-4, gt=0)
    warmup_steps: int = Field(10, ge=0)
    steps: int = 100
    kind: Literal["muon", "adamw"] = "muon"

    @model_validator(mode="after")
    def check(self) -> "Optim":
        if self.warmup_steps > self.steps:
            raise ValueError("warmup_steps is more than steps")
        return self


class Stage(BaseSettings):
    tokens: int
    optim: Optim = Optim()


class Uniform(BaseSettings):
    kind: Literal["uniform"] = "uniform"


class Weighted(BaseSettings):
    kind: Literal["weighted"]
    weights: dict[str, float]


class Run(BaseSettings):
    name: str = "nano"
    seed: int | None = None
    resume: bool = False
    layers: tuple[str, ...] = Field(("mla",), min_length=1)
    size: int | str = 4
    optim: Optim = Optim()
    stages: tuple[Stage, ...] = ()
    named: Mapping[str, Stage] = {}
    mixture: Annotated[Uniform | Weighted, Field(discriminator="kind")] = Uniform()


def resolved(values: dict) -> Run:
    return resolve(Run, Recipe(values, {}))


def problems(values: dict) -> list[str]:
    with pytest.raises(ConfigError) as error:
        resolved(values)
    return str(error.value).splitlines()


def test_an_empty_recipe_is_the_defaults():
    assert resolved({}) == Run()


def test_a_recipe_reaches_every_kind_of_setting():
    run = resolved(
        {
            "layers": ["mla", "swa"],
            "seed": 3,
            "optim": {"lr": 1},
            "stages": [{"tokens": 5}, {"tokens": 6, "optim": {"steps": 20}}],
            "named": {"a": {"tokens": 7}},
            "mixture": {"kind": "weighted", "weights": {"math v1.2": 0.5}},
        }
    )
    assert run == Run(
        layers=("mla", "swa"),
        seed=3,
        optim=Optim(lr=1.0),
        stages=(Stage(tokens=5), Stage(tokens=6, optim=Optim(steps=20))),
        named={"a": Stage(tokens=7)},
        mixture=Weighted(kind="weighted", weights={"math v1.2": 0.5}),
    )


def test_an_unknown_key_is_reported_with_path_file_and_suggestion(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text("[optim]\nwarmup_step = 5")
    (tmp_path / "x.toml").write_text("extends = 'base.toml'\n[optim]\nlr = 1.0")
    with pytest.raises(ConfigError) as error:
        resolve(Run, load_recipe("x.toml", ["optm.lr=1"]))
    assert str(error.value).splitlines() == [
        "unknown setting 'optim.warmup_step' in base.toml; did you mean 'optim.warmup_steps'?",
        "unknown setting 'optm' in --set; did you mean 'optim'?",
    ]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"lr": 1}, "unknown setting 'lr'; did you mean 'optim.lr'?"),
        ({"zzz": 1}, "unknown setting 'zzz'"),
        (
            {"stages": [{"tokens": 1}, {"tokens": 1, "optim": {"stpes": 1}}]},
            "unknown setting 'stages[1].optim.stpes'; did you mean 'stages[1].optim.steps'?",
        ),
        (
            {"named": {"a b": {"tokens": 1, "token": 2}}},
            "unknown setting 'named.\"a b\".token'; did you mean 'named.\"a b\".tokens'?",
        ),
        (
            {"mixture": {"kind": "weighted", "weights": {}, "weight": 1}},
            "unknown setting 'mixture.weight'; did you mean 'mixture.weights'?",
        ),
    ],
)
def test_a_similar_key_is_suggested_at_any_depth(values, problem):
    assert problems(values) == [problem]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"seed": "7"}, "'seed' must be an integer, got \"7\""),
        ({"seed": 7.0}, "'seed' must be an integer, got 7.0"),
        ({"seed": True}, "'seed' must be an integer, got true"),
        ({"name": 7}, "'name' must be a string, got 7"),
        ({"resume": 1}, "'resume' must be true or false, got 1"),
        ({"optim": 3}, "'optim' must be a table, got 3"),
        ({"named": [1]}, "'named' must be a table, got [1]"),
        ({"layers": "mla"}, "'layers' must be a list, got \"mla\""),
        ({"layers": ["mla", 2]}, "'layers[1]' must be a string, got 2"),
        ({"layers": [2]}, "'layers[0]' must be a string, got 2"),
        ({"layers": []}, "'layers' must be a list of at least 1, got []"),
        ({"size": [4]}, "'size' must be an integer or a string, got [4]"),
        ({"optim": {"lr": "1"}}, "'optim.lr' must be a number, got \"1\""),
        ({"optim": {"lr": -1}}, "'optim.lr' must be greater than 0, got -1"),
        (
            {"optim": {"warmup_steps": -1}},
            "'optim.warmup_steps' must be greater than or equal to 0, got -1",
        ),
        ({"optim": {"kind": "sgd"}}, "'optim.kind' must be 'muon' or 'adamw', got \"sgd\""),
        ({"stages": [{}]}, "missing setting 'stages[0].tokens'"),
        (
            {"optim": {"warmup_steps": 200}},
            "'optim' is invalid: warmup_steps is more than steps",
        ),
        (
            {"mixture": {"kind": "odd"}},
            "'mixture' must be a table whose 'kind' is one of 'uniform', 'weighted', not 'odd'",
        ),
        ({"mixture": {}}, "'mixture' must be a table with the key 'kind'"),
    ],
)
def test_a_wrong_value_is_reported_with_the_allowed_ones(values, problem):
    assert problems(values) == [problem]


def test_every_problem_is_reported_on_its_own_line_with_its_origin(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text("stages = [{tokens = 'many'}]")
    with pytest.raises(ConfigError) as error:
        resolve(Run, load_recipe("x.toml", ["optim.lr=0", "name=nano"]))
    assert str(error.value).splitlines() == [
        "'optim.lr' in --set must be greater than 0, got 0",
        "'stages[0].tokens' in x.toml must be an integer, got \"many\"",
    ]


def test_a_validator_can_reject_the_whole_recipe():
    class Picky(BaseSettings):
        a: int = 1

        @model_validator(mode="after")
        def check(self) -> "Picky":
            raise ValueError("a and b disagree")

    with pytest.raises(ConfigError, match=r"^the recipe is invalid: a and b disagree$"):
        resolve(Picky, Recipe({"a": 1}, {}))


def test_a_date_is_kept_as_text(tmp_path):
    (tmp_path / "x.toml").write_text("name = 2026-11-15")
    assert resolve(Run, load_recipe(tmp_path / "x.toml")).name == "2026-11-15"
