"""Small tokenizers and corpora for tests."""

from functools import cache

from paddock.data.shards import CorpusManifest, IndexedDataset, ShardWriter
from paddock.text import train_tokenizer

PROSE = (
    "The old harbour was quiet in the morning. A single boat came in with the tide.",
    "Nobody on the quay had expected it, and nobody knew the man at the helm.",
    "def area(width, height):\n    return width * height\n",
    "Rain fell on the hills for three days, and the river rose above the bridge.",
)


@cache
def byte_tokenizer():
    return train_tokenizer(PROSE, vocab=400)


def make_datasets(folder, lengths, *, shard_tokens=1000):
    """Documents of the given lengths by source; all tokens are distinct."""
    manifest = CorpusManifest(key="k", tokenizer="t", vocab_size=2**20, sources={})
    found, first = {}, 0
    for source, sizes in lengths.items():
        (folder / source).mkdir(parents=True)
        writer = ShardWriter(
            folder / source, "train", dtype=manifest.dtype, tokens_per_shard=shard_tokens
        )
        for size in sizes:
            writer.add(list(range(first, first + size)))
            first += size
        found[source] = IndexedDataset(folder / source, writer.close(), manifest)
    return found
