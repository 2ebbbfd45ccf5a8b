"""A custom environment, named by its module and settings class."""

import sys

import pytest

from paddock.envs import EnvError, make

OWN = """
from paddock.envs import EnvSettings
from paddock.envs.nano.chain import NanoChainSettings

class Mine(NanoChainSettings):
    pass

class Other:
    pass

class Torn(EnvSettings):
    def make_taskset(self):
        raise KeyError("colour")

class Leaving(EnvSettings):
    def make_taskset(self):
        raise SystemExit(0)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "worlds_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "worlds_that_leave.py").write_text("raise SystemExit(0)")
    yield "worlds_of_mine"
    sys.modules.pop("worlds_of_mine", None)


def test_a_custom_environment_is_made_by_module_and_settings(module):
    mine, ours = make(f"{module}:Mine", {"seed": 3}), make("nano-chain", {"seed": 3})
    assert mine.task(5).messages == ours.task(5).messages
    with pytest.raises(EnvError, match="unknown setting 'colour'"):
        make(f"{module}:Mine", {"colour": 3})


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("worlds_of_mine:Nothing", "has no attribute 'Nothing'"),
        ("worlds_of_mine:Other", "must be a subclass of EnvSettings"),
        ("worlds_of_nobody:Mine", "No module named 'worlds_of_nobody'"),
        (":Mine", "not found"),
        ("nobody", "environment 'nobody' not found"),
        ("worlds_of_mine:Torn", "'worlds_of_mine:Torn' cannot be made: KeyError: 'colour'"),
        ("worlds_of_mine:Leaving", "'worlds_of_mine:Leaving' cannot be made: SystemExit: 0"),
        ("worlds_that_leave:Mine", "'worlds_that_leave:Mine' not found: SystemExit: 0"),
    ],
)
def test_an_invalid_custom_environment_is_reported(module, name, complaint):
    with pytest.raises(EnvError, match=complaint):
        make(name)
