import tomllib
from collections.abc import Mapping
from math import nan

from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.config import BaseSettings, Recipe, dump_toml, load_recipe, resolve

numbers = st.floats(allow_nan=False)  # infinities too; nan is not equal to itself


class Leaf(BaseSettings):
    text: str = "a"
    whole: int = 1
    number: float = 0.5
    yes: bool = True
    maybe: int | None = None
    many: tuple[float, ...] = (1.0,)


class Branch(BaseSettings):
    leaf: Leaf = Leaf()
    perhaps: Leaf | None = None
    words: tuple[tuple[str, ...], ...] = ()
    leaves: tuple[Leaf, ...] = (Leaf(),)
    weights: Mapping[str, float] = {"default": 1.0}


class Tree(BaseSettings):
    branch: Branch = Branch()
    name: str = "tree"
    branches: tuple[Branch, ...] = ()
    by_name: Mapping[str, Branch] = {}
    tables: Mapping[str, Mapping[str, tuple[str, ...]]] = {}


leaves = st.builds(
    Leaf,
    text=st.text(),
    whole=st.integers(),
    number=numbers,
    yes=st.booleans(),
    maybe=st.none() | st.integers(),
    many=st.lists(numbers, max_size=2).map(tuple),
)
branches = st.builds(
    Branch,
    leaf=leaves,
    perhaps=st.none() | leaves,
    words=st.lists(st.lists(st.text(), max_size=2).map(tuple), max_size=2).map(tuple),
    leaves=st.lists(leaves, max_size=2).map(tuple),
    weights=st.dictionaries(st.text(), numbers, max_size=2),
)
trees = st.builds(
    Tree,
    branch=branches,
    name=st.text(),
    branches=st.lists(branches, max_size=2).map(tuple),
    by_name=st.dictionaries(st.text(), branches, max_size=2),
    tables=st.dictionaries(
        st.text(), st.dictionaries(st.text(), st.just(("x",)), max_size=2), max_size=2
    ),
)


@settings(max_examples=50)
@given(trees)
def test_dumped_settings_resolve_to_the_same_settings(tree):
    assert resolve(Tree, Recipe(tomllib.loads(dump_toml(tree)), {})) == tree


@given(st.text(st.characters(max_codepoint=0xFF)))
def test_strings_are_escaped(text):
    assert tomllib.loads(dump_toml(Leaf(text=text)))["text"] == text


def test_a_dumped_recipe_loads_from_a_file(tmp_path):
    tree = Tree(name="ünï\u2028\x7f", branch=Branch(leaves=()), by_name={"a.b": Branch()})
    (tmp_path / "recipe.toml").write_text(dump_toml(tree), encoding="utf-8")
    assert resolve(Tree, load_recipe(tmp_path / "recipe.toml")) == tree


def test_nan_is_written_as_nan():
    text = dump_toml(Leaf(number=nan))
    assert dump_toml(resolve(Leaf, Recipe(tomllib.loads(text), {}))) == text
    assert "number = nan" in text


def test_a_none_is_left_out_and_an_empty_table_is_not():
    text = dump_toml(Branch(weights={}))
    assert "perhaps" not in text and "maybe" not in text
    assert "[weights]" in text


def test_a_list_of_tables_is_written_as_tables():
    assert dump_toml(Branch(leaves=(Leaf(), Leaf()))).count("[[leaves]]") == 2
