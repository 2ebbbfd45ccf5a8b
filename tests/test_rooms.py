import subprocess
import sys
from pathlib import Path

import pytest

import paddock
from tests.conftest import SECONDS
from tests.rooms import DOORS, TORCH, breaches, house, listed, present

ROOT = Path(paddock.__file__).parent
ROOMS = house(paddock.__doc__ or "")
BUILT = [ROOT / room for room in ROOMS if any((ROOT / room).rglob("*.py"))]
LIGHT = set(ROOMS) - TORCH - {"serve"}  # serve stands on the engine, which needs torch


def plant(root, file, source):
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(source)


def test_every_arrow_points_up_the_table():
    above = set()
    for room, used in ROOMS.items():
        assert used <= above, room
        above.add(room)


def test_the_doors_are_in_rooms_of_the_table():
    assert {place.split("/")[0] for places in DOORS.values() for place in places} <= set(ROOMS)


def test_the_house_keeps_its_law():
    assert list(breaches(ROOT, ROOMS)) == []


@pytest.mark.parametrize(
    ("file", "source", "line", "crime"),
    [
        ("engine/a.py", "def f():\n    import paddock.train.loop", 2, "import 'train'"),
        ("engine/a.py", "from paddock import rl", 1, "import 'rl'"),
        ("model/mla/a.py", "from ..b import c", 1, "reach out of its folder by a relative import"),
        ("envs/a.py", "def f():\n    from torch import nn", 2, "use 'torch'"),
        ("train/a.py", "import torch\ntorch.cuda.synchronize()", 2, "use 'torch.cuda'"),
        ("kernels/a.py", "import triton.language as tl", 1, "use 'triton'"),
        ("rollout/a.py", "import subprocess", 1, "use 'subprocess'"),
        ("engine/a.py", "import os\n\nos.environ['A']", 3, "use 'os.environ'"),
        ("engine/a.py", "from os import getenv", 1, "use 'os.getenv'"),
        ("train/a.py", "def f():\n    print('step')", 2, "use 'print'"),
        ("cli/a.py", "import argparse", 1, "use 'argparse'"),
    ],
)
def test_a_breach_is_named_with_file_and_line(tmp_path, file, source, line, crime):
    plant(tmp_path, file, source)
    room = file.split("/")[0]
    assert list(breaches(tmp_path, ROOMS)) == [f"{file}:{line}: '{room}' may not {crime}"]


@pytest.mark.parametrize("name", ["utils/a.py", "helpers.py"])
def test_what_is_not_in_the_table_is_a_breach(tmp_path, name):
    plant(tmp_path, name, "")
    assert list(breaches(tmp_path, ROOMS)) == [f"{name.split('/')[0]}: no room has this name"]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("kernels/topk/triton.py", "import triton"),
        ("cli/a.py", "import os, subprocess\ndef f():\n    import torch\n    print(os.environ)"),
        ("model/mla/a.py", "from .b import x\nfrom paddock.model.rope import y"),
    ],
)
def test_what_the_law_allows_is_no_breach(tmp_path, file, source):
    plant(tmp_path, file, source)
    assert list(breaches(tmp_path, ROOMS)) == []


def test_every_room_names_what_is_in_it():
    wrong = {room.name: listed(room) ^ present(room) for room in BUILT}
    assert {room: names for room, names in wrong.items() if names} == {}


def test_a_room_is_read_line_by_line(tmp_path):
    plant(tmp_path, "__init__.py", '"""A room.\n\na.py  one,\n      continued\nop/   two\n"""\n')
    plant(tmp_path, "op/reference.py", "")
    assert listed(tmp_path) == {"a.py", "op"}
    assert present(tmp_path) == {"op"}


def test_no_file_outgrows_its_page():
    files = [*ROOT.rglob("*.py"), *Path(__file__).parent.rglob("*.py")]
    lines = {str(file): len(file.read_text().splitlines()) for file in files}
    assert {file: count for file, count in lines.items() if count > 400} == {}


def test_the_files_that_begin_first_are_there():
    folder = Path(__file__).parent
    assert [file for file in SECONDS if not (folder / file).exists()] == []


def complaint_of_importing(modules):
    """What a fresh interpreter says when one of `modules` fails to load or loads torch."""
    code = """if True:
        import importlib, sys
        for name in sys.argv[1:]:
            importlib.import_module(name)
            if "torch" in sys.modules:
                sys.exit(f"{name} loads torch")
    """
    command = [sys.executable, "-c", code, *modules]
    done = subprocess.run(command, cwd=ROOT.parent, stderr=subprocess.PIPE, text=True)
    return done.stderr if done.returncode else ""


def test_the_light_rooms_load_without_torch():
    files = [file for room in BUILT if room.name in LIGHT for file in sorted(room.rglob("*.py"))]
    paths = [file.relative_to(ROOT.parent).with_suffix("") for file in files]
    modules = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    assert complaint_of_importing(modules) == ""


def test_loading_torch_is_noticed():
    assert complaint_of_importing(["json", "torch.version"]) == "torch.version loads torch\n"
