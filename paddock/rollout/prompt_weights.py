"""Prompts drawn by their running pass rate: those that are always or never solved come less often.

A group of equal rewards teaches nothing. The numbers of a task count through its prompts, over and
over; a number whose prompt has running pass rate p is drawn with the probability

    w(p) = min_weight + (1 - min_weight) * 4 p (1 - p)

and skipped otherwise: 1 at p = 1/2 and for a prompt never tried, `min_weight` at 0 and 1, so that
every prompt comes again. p is a moving average over the prompt's groups. Whether a number is drawn
is computed from its seed and p alone, and p from the groups in the ledger.
"""

from collections.abc import Iterable
from hashlib import blake2b

from paddock.rollout.settings import PromptWeightSettings


class PromptWeights:
    """Running pass rates of the prompts of one task.

    >>> weights = PromptWeights(
    ...     PromptWeightSettings(min_weight=0.2, momentum=0.5), num_prompts=3, key="sums/0"
    ... )
    >>> weights.record(0, [1.0, 1.0])
    >>> weights.record(4, [0.0, 1.0])
    >>> [round(weights.weight(prompt), 3) for prompt in range(3)]
    [0.2, 1.0, 1.0]
    >>> weights.record(3, [0.0, 0.0])
    >>> weights.pass_rate, weights.weight(0)
    ({0: 0.5, 1: 0.5}, 1.0)
    """

    def __init__(self, settings: PromptWeightSettings, *, num_prompts: int, key: str) -> None:
        """`key` is that of the draws: the seed of the run and the task."""
        self._settings, self._num_prompts, self._key = settings, num_prompts, key
        self.pass_rate: dict[int, float] = {}  # of the prompts that were tried

    def record(self, number: int, rewards: Iterable[float]) -> None:
        """A group of the prompt of `number` has ended with these rewards, failures left out."""
        passed = [reward >= self._settings.pass_reward for reward in rewards]
        if passed:
            prompt, rate = number % self._num_prompts, sum(passed) / len(passed)
            before = self.pass_rate.get(prompt, rate)
            momentum = self._settings.momentum
            self.pass_rate[prompt] = momentum * before + (1 - momentum) * rate

    def weight(self, prompt: int) -> float:
        rate, floor = self.pass_rate.get(prompt, 0.5), self._settings.min_weight
        return floor + (1 - floor) * 4 * rate * (1 - rate)

    def is_drawn(self, number: int) -> bool:
        digest = blake2b(f"{self._key}\0{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") / 2**64 < self.weight(number % self._num_prompts)
