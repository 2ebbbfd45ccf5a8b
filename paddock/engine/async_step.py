"""Steps in flight: launched on the device, not yet read by the host.

With asynchronous scheduling the next step is launched before the tokens of the last one are read:
it takes them on the device (future tokens). T tokens of a step, N sampled rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paddock.engine.kv_cache import copy_to_device_async
from paddock.engine.output_processor import SampledRows, SampledTokens
from paddock.engine.scheduler import ScheduledStep


@dataclass(frozen=True, slots=True, eq=False)
class FutureTokens:
    """Tokens of a step that only the device knows."""

    row_T: np.ndarray  # row among the sampled tokens of the step before; -1: the host knows it
    token_N: Tensor

    def fill(self, token_T: Tensor) -> Tensor:
        """`token_T` with the tokens that only the device knows in their places."""
        row_T = copy_to_device_async(self.row_T, token_T.device)
        sampled_T = self.token_N[row_T.clamp_min(0)].to(token_T.dtype)
        return torch.where(row_T >= 0, sampled_T, token_T)

    def padded_to(self, tokens: int, query_len: int) -> "FutureTokens":
        """With copies of the first sequence behind, like the batch of a CUDA graph."""
        row_T = np.concatenate((self.row_T, np.tile(self.row_T[:query_len], tokens)))[:tokens]
        return FutureTokens(row_T, self.token_N)


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """Tokens and log-probabilities on their way to the host. Reading them waits for the step that
    sampled them, not for steps launched later."""

    both_2N: Tensor  # float64, which holds both exactly
    copied: torch.Event | None  # None: on a CPU

    @classmethod
    def of(cls, token_N: Tensor, logprob_N: Tensor) -> "HostCopy":
        both_2N = torch.stack((token_N.double(), logprob_N.double()))
        if both_2N.device.type != "cuda":
            return cls(both_2N, None)
        both_2N = both_2N.to("cpu", non_blocking=True)  # into pinned memory
        copied = torch.Event(token_N.device)
        copied.record()
        return cls(both_2N, copied)

    def read(self) -> tuple[list[int], list[float]]:
        if self.copied is not None:
            self.copied.synchronize()
        token_N, logprob_N = self.both_2N.tolist()
        return [int(token) for token in token_N], logprob_N


@dataclass(frozen=True, slots=True, eq=False)
class StepInFlight:
    """A launched step."""

    step: ScheduledStep
    launched_at: float
    rows: list[SampledRows]
    sampled: SampledTokens
    token_N: Tensor | None  # on the device; None if nothing is sampled
    host_copy: HostCopy | None
    mtp_extend: Callable[[np.ndarray], Tensor] | None  # with drafts: next tokens -> MTP states

    def future_tokens(self, step: ScheduledStep) -> FutureTokens | None:
        """The tokens of the next step that this one samples; None if there are none."""
        if self.token_N is None or not any(s.num_in_flight for s in step.sequences):
            return None
        row_of = {id(row.sequence): row.first for row in self.rows}
        rows: list[int] = []
        for each in step.scheduled:
            known = each.tokens - each.sequence.num_in_flight
            rows += [-1] * known
            if each.sequence.num_in_flight:
                rows.append(row_of[id(each.sequence)])
        return FutureTokens(np.array(rows, dtype=np.int64), self.token_N)
