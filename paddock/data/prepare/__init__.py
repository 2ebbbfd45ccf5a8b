"""What happens to documents between their source and the shards.

settings.py  what a corpus is made of
clean.py     text made plain, and what is no text left out
dedup.py     copies, exact and near
fim.py       code with its middle last
build.py     all of it, into a folder that appears when it is complete
"""

from paddock.data.prepare.build import Progress, corpus_key, prepare_corpus
from paddock.data.prepare.settings import CorpusSettings, QualityFilterSettings, Source

__all__ = [
    "CorpusSettings",
    "Progress",
    "QualityFilterSettings",
    "Source",
    "corpus_key",
    "prepare_corpus",
]
