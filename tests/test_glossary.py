"""docs/glossary.md holds every public name and settings key; a public class name exists once."""

import ast
import importlib
import re
from collections import defaultdict
from pathlib import Path

import paddock
from paddock.config import BaseSettings
from tests.architecture import syntax_tree

ROOT = Path(paddock.__file__).parent
GLOSSARY = (ROOT.parent / "docs" / "glossary.md").read_text()
WORDS = {word for cell in re.findall(r"`([^`]+)`", GLOSSARY) for word in re.findall(r"\w+", cell)}
PACKAGES = sorted(folder.parent.name for folder in ROOT.glob("*/__init__.py"))


def exported(package):
    """The names in a package's `__all__`, read from its syntax tree."""
    for node in syntax_tree(ROOT / package / "__init__.py").body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [element.value for element in node.value.elts]
    return []


def settings_keys():
    """Every key of every settings class, with its class."""
    for file in sorted(ROOT.rglob("settings.py")) + sorted(ROOT.rglob("taskset.py")):
        name = ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)
        importlib.import_module(name)
    seen = [BaseSettings]
    for cls in seen:
        seen += [sub for sub in cls.__subclasses__() if sub.__module__.startswith("paddock.")]
    return {(cls.__name__, key) for cls in seen for key in cls.model_fields}


def test_every_exported_name_is_in_the_glossary():
    missing = {p: [n for n in exported(p) if n not in WORDS] for p in PACKAGES}
    assert {package: names for package, names in missing.items() if names} == {}


def test_every_settings_key_is_in_the_glossary():
    assert sorted((cls, key) for cls, key in settings_keys() if key not in WORDS) == []


def test_no_public_class_name_stands_in_two_files():
    files = defaultdict(list)
    for file in ROOT.rglob("*.py"):
        for node in syntax_tree(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(file.relative_to(ROOT).as_posix())
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


def test_a_package_exports_at_most_thirty_names():
    counts = {
        package: len(exported(package)) for package in PACKAGES if package not in ("kernels", "cli")
    }
    assert {package: count for package, count in counts.items() if not 0 < count <= 30} == {}
