"""Counter-based random numbers: the n-th value is computed, so a position is the whole state.

Integer arithmetic only: identical on every machine and with every library version.
"""

from hashlib import blake2b

_ONES = (1 << 64) - 1
_ROUNDS = 6


def derive_seed(*parts: object) -> int:
    """A 64-bit hash of these values.

    >>> derive_seed("code", 0) != derive_seed("code", 1)
    True
    """
    text = "\0".join(map(str, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def uniform_at(stream: int, n: int) -> float:
    """The n-th number of the stream, uniform in [0, 1)."""
    return (_splitmix64(stream + n * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def permute_index(position: int, count: int, stream: int) -> int:
    """Index at `position` of a random permutation of range(count), in constant time and memory.

    A Feistel network over the next power of two, repeated until the result is below `count`
    (cycle walking): a corpus of any size is reshuffled every epoch without storing a permutation.

    >>> sorted(permute_index(i, 7, stream=5) for i in range(7))
    [0, 1, 2, 3, 4, 5, 6]
    """
    assert 0 <= position < count, (position, count)
    bits = max(2, (count - 1).bit_length())
    left_bits, right_bits = bits // 2, bits - bits // 2
    while True:
        left, right = position >> right_bits, position & ((1 << right_bits) - 1)
        widths = (left_bits, right_bits)
        for i in range(_ROUNDS):
            mask = (1 << widths[0]) - 1
            left, right = right, left ^ (_splitmix64(stream + (i << 56) + right) & mask)
            widths = widths[::-1]
        position = (left << right_bits) | right
        if position < count:
            return position


def _splitmix64(x: int) -> int:
    """splitmix64's finalizer."""
    x = (x + 0x9E3779B97F4A7C15) & _ONES
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _ONES
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _ONES
    return x ^ (x >> 31)
