"""A pipeline of small stages in its own folder."""

from paddock.config import dump_toml
from paddock.data import CorpusSettings
from paddock.data.reasoning import ReasoningSource
from tests.train.tiny import network_folder, settings


def write_pipeline(tmp_path, pipeline, *, steps, **recipes):
    """Write `pipeline` with the recipe `first`, a few steps of a tiny network, and others."""
    source = ReasoningSource(name="chains", family="chains", count=300)
    corpus = CorpusSettings(sources=(source,), held_out_fraction=0.3)
    chosen = settings(network_folder(tmp_path / "init"), steps=steps, corpus=corpus)
    folder = tmp_path / "plan"
    folder.mkdir()
    for name, text in {"pipeline": pipeline, "first": dump_toml(chosen), **recipes}.items():
        (folder / f"{name}.toml").write_text(text)
    return folder
