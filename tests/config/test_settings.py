import pytest
from pydantic import ValidationError

from paddock.config import BaseSettings


class Optim(BaseSettings):
    lr: float = 3e-4
    steps: int = 10
    betas: tuple[float, ...] = (0.9, 0.95)


def test_settings_cannot_be_changed():
    with pytest.raises(ValidationError):
        Optim().lr = 1.0


def test_a_default_is_checked_like_a_given_value():
    class Broken(BaseSettings):
        steps: int = "ten"

    with pytest.raises(ValidationError):
        Broken()


@pytest.mark.parametrize(
    "given", [{"steps": "10"}, {"steps": 10.0}, {"steps": True}, {"lr": "3e-4"}, {"lrr": 1.0}]
)
def test_nothing_is_converted_or_ignored(given):
    with pytest.raises(ValidationError):
        Optim(**given)


def test_an_integer_is_accepted_for_a_float():
    assert Optim(lr=1).lr == 1.0


@pytest.mark.parametrize("default", [..., 5])
def test_a_setting_that_may_be_none_must_default_to_none(default):
    with pytest.raises(TypeError, match=r"Odd\.size may be None"):
        type("Odd", (BaseSettings,), {"__annotations__": {"size": int | None}, "size": default})


@pytest.mark.parametrize("kind", [dict[str, int | None], tuple[int | None, ...] | None])
def test_a_none_inside_a_list_or_table_is_rejected(kind):
    with pytest.raises(TypeError, match=r"Odd\.sizes may contain None"):
        type("Odd", (BaseSettings,), {"__annotations__": {"sizes": kind}, "sizes": None})
