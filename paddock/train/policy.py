"""Reinforcement learning as an objective of the one step: samples in, a policy loss out.

The loss itself is the caller's, a function of log-probabilities (`TokenLoss`); here is what needs
the network: packing samples, finding the log-probabilities of what was sampled, replaying the
experts that the engine chose, and a witness that every token was there when gradients were made.

S tokens of packed samples, T of them this rank's own, N trained tokens, L layers with experts, K
experts of a token, D hidden.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paddock.kernels.linear_cross_entropy import token_logprobs
from paddock.model import AttentionMetadata, Routing, TopKRouter, Transformer, config
from paddock.records import TrainSample
from paddock.train.micro_batch import MicroBatch, PolicyBatch, TokenCounts, iter_micro_batches
from paddock.train.objective import Losses


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicySample:
    """A sample as the trainer takes it: with what its tokens weigh, and what others think of them.
    Arrays have a row for each token."""

    sample: TrainSample
    weight: float  # of each trained token in the batch's loss
    temperature: float = 1.0  # the log-probabilities were taken at
    teacher_logprob_S: NDArray[np.float32] | None = None  # a teacher's log-probabilities
    teacher_weight: float = 0.0  # how much the teacher's opinion counts
    routed_experts_SLK: NDArray[np.int16] | None = (
        None  # the engine's choice; -1 where it is not known
    )


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTokens:
    """The trained tokens of a micro-batch."""

    logprob_N: Tensor  # with gradient
    old_logprob_N: Tensor  # the same network's, before the first update on this batch
    rollout_logprob_N: Tensor
    advantage_N: Tensor
    teacher_logprob_N: Tensor
    teacher_weight_N: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenLossOutput:
    """What to minimise at each token, and numbers to report as means over tokens."""

    loss_N: Tensor
    metrics: Mapping[str, Tensor]


class TokenLossFn(Protocol):
    def __call__(self, tokens: PolicyTokens, /) -> TokenLossOutput: ...


class PolicyObjective:
    """Weighted sum of a token loss over what the policy chose. `witness` sees each token pass."""

    def __init__(self, loss: TokenLossFn, *, replay: bool = False) -> None:
        self.loss, self.replay = loss, replay
        self.token_stats = GradientTokenCounter()

    def __call__(
        self,
        network: Transformer,
        batch: MicroBatch,
        counts: TokenCounts,
        progress: float,  # noqa: ARG002
    ) -> Losses:
        with replay_routing(network, batch, replay=self.replay) as apart:
            logp_T = compute_token_logprobs(network, batch)
        place_N = (batch.targets(1) >= 0).nonzero().squeeze(1)

        def said(name: str) -> Tensor:
            return batch.shift_ahead(batch.columns[name], 1, nothing=0)[place_N]

        logp_N = self.token_stats.track(logp_T[place_N], said("sample"))
        rollout_N = said("rollout")
        found = self.loss(
            PolicyTokens(
                logp_N,
                said("old") if "old" in batch.columns else logp_N.detach(),
                rollout_N,
                said("advantage"),
                said("teacher"),
                said("teaching"),
            )
        )
        total = (said("weight") * found.loss_N).sum()
        parts = {"policy_loss": total.detach()}
        for name, value_N in {
            **logprob_diff_metrics(logp_N.detach(), rollout_N),
            **found.metrics,
        }.items():
            parts[name] = value_N.detach().sum() / counts.targets[0]
        if apart.asked:
            parts["routing_mismatch"] = apart.mean(counts.tokens)
        return Losses(total, parts)


def logprob_diff_metrics(logp_N: Tensor, rollout_N: Tensor) -> dict[str, Tensor]:
    """How far trainer and engine disagree about tokens that the engine sampled, and how sure it was
    of them: the mean of -log p over what was sampled is the policy's entropy, estimated."""
    gap_N = logp_N - rollout_N
    return {
        "logprob_diff": gap_N.abs(),
        "train_inference_kl": gap_N.clamp(-20, 20).exp() - 1 - gap_N,
        "entropy": -rollout_N,
    }


def compute_token_logprobs(network: Transformer, batch: MicroBatch) -> Tensor:
    """[T] of each token's successor where that is trained, at the temperature it was sampled at."""
    hidden_TD = _hidden(network, batch)
    temperature_T = batch.shift_ahead(batch.columns["temperature"], 1, nothing=1.0)
    if bool((temperature_T != 1).any()):
        # Logits are linear in the hidden state, so that one division serves any kernel.
        hidden_TD = hidden_TD / temperature_T.unsqueeze(1).to(hidden_TD.dtype)
    return token_logprobs(hidden_TD, network.head.weight, batch.targets(1))


def _hidden(network: Transformer, batch: MicroBatch) -> Tensor:
    """The states of all tokens; what samples of a group begin with alike is computed once."""
    branches = shared_prefix_metadata(network, batch)
    if branches is None:
        return network(batch.token_T, batch.attn_metadata).hidden_TD
    assert branches.query_T is not None
    return branches.expand_queries(network(batch.token_S[branches.query_T], branches).hidden_TD)


def shared_prefix_metadata(network: Transformer, batch: MicroBatch) -> AttentionMetadata | None:
    """None where nothing is shared, and for layers that keep a state: it does not branch."""
    recurrent = any(kind in config.LINEAR_ATTENTION for kind in network.config.attention)
    return None if recurrent else batch.shared_prefixes


@torch.no_grad()
def compute_logprobs(
    network: Transformer,
    batch: PolicyBatch,
    *,
    micro_tokens: int | None = None,
    replay: bool = False,
) -> NDArray[np.float32]:
    """[S] the network's log-probabilities of the trained tokens, each in its own place; elsewhere
    0."""
    found = np.zeros(len(batch.token_T), np.float32)
    first = 0
    for micro in iter_micro_batches(batch, network.embed.weight.device, micro_tokens):
        with replay_routing(network, micro, replay=replay):
            logp_T = compute_token_logprobs(network, micro)
        place_N = (micro.targets(1) >= 0).nonzero().squeeze(1)
        found[first + 1 + place_N.cpu().numpy()] = logp_T[place_N].float().cpu().numpy()
        first += len(micro.token_S)
    return found


def pack_samples(
    lessons: Sequence[PolicySample], old_S: NDArray[np.float32] | None = None
) -> PolicyBatch:
    """Samples side by side, in the order they are given; with `old_S`, what the network thought of
    them before the first of several updates."""
    samples = [lesson.sample for lesson in lessons]
    lengths = tuple(len(sample.token_ids) for sample in samples)

    def spread(values: Sequence[float], dtype: Any = np.float32) -> NDArray[Any]:
        """A number for each sample as one for each token."""
        return np.repeat(np.array(values, dtype), lengths)

    columns: dict[str, NDArray[Any]] = {
        "rollout": _joined([s.logprobs for s in samples], np.float32),
        "advantage": _joined([s.advantages for s in samples], np.float32),
        "weight": spread([lesson.weight for lesson in lessons]),
        "temperature": spread([lesson.temperature for lesson in lessons]),
        "teaching": spread([lesson.teacher_weight for lesson in lessons]),
        "sample": spread(range(len(samples)), np.int64),
        "teacher": np.concatenate(
            [
                np.zeros(len(lesson.sample.token_ids), np.float32)
                if lesson.teacher_logprob_S is None
                else lesson.teacher_logprob_S.astype(np.float32)
                for lesson in lessons
            ]
        ),
    }
    if old_S is not None:
        columns["old"] = old_S
    if (experts := _experts(lessons)) is not None:
        columns["experts"] = experts
    trained_S = _joined([s.loss_mask for s in samples], np.bool_)
    return PolicyBatch(
        token_T=_joined([s.token_ids for s in samples], np.int32),
        loss_mask_T=trained_S,
        lengths=lengths,
        sources=("rollout",) * len(samples),
        num_targets=int(trained_S.sum()),
        columns=columns,
    )


def _joined(rows: Sequence[Sequence[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.array(row, dtype) for row in rows])


def _experts(lessons: Sequence[PolicySample]) -> NDArray[np.int16] | None:
    """The engine's choices, all of them or -1; None if none is known."""
    known = next(
        (each.routed_experts_SLK for each in lessons if each.routed_experts_SLK is not None), None
    )
    if known is None:
        return None
    rows = []
    for lesson in lessons:
        found = np.full((len(lesson.sample.token_ids), *known.shape[1:]), -1, np.int16)
        if lesson.routed_experts_SLK is not None:
            found[: len(lesson.routed_experts_SLK)] = lesson.routed_experts_SLK
        rows.append(found)
    return np.concatenate(rows)


class GradientTokenCounter:
    """Counts, while gradients are made, the tokens of each sample that they come from. Bookkeeping
    can be wrong about what reached the optimizer; the backward pass cannot."""

    def __init__(self) -> None:
        self.seen = torch.zeros(0, dtype=torch.int64)

    def reset(self, samples: int) -> None:
        self.seen = torch.zeros(samples, dtype=torch.int64)

    def track(self, logp_N: Tensor, sample_N: Tensor) -> Tensor:
        if not logp_N.requires_grad:
            return logp_N
        passed: Tensor = _Passing.apply(logp_N, sample_N, self._count)
        return passed

    def _count(self, sample_N: Tensor) -> None:
        self.seen += sample_N.cpu().bincount(minlength=len(self.seen))


class _Passing(torch.autograd.Function):
    """The identity, which tells when it is differentiated."""

    @staticmethod
    def forward(
        ctx: Any, logp_N: Tensor, sample_N: Tensor, count: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.sample_N, ctx.count = sample_N, count
        return logp_N.view_as(logp_N)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        ctx.count(ctx.sample_N)
        return grad_N, None, None


class RoutingMismatch:
    """How often the trainer's routers would have chosen other experts than the engine's did."""

    def __init__(self, asked: bool) -> None:
        self.asked = asked
        self.tokens: list[Tensor] = []  # of each layer, those with another choice
        self.every: Callable[[Tensor], Tensor] = lambda x_T: x_T  # shared ones as often as they are

    def mean(self, tokens: int) -> Tensor:
        return torch.stack(self.tokens).float().mean() / tokens


@contextmanager
def replay_routing(
    network: Transformer, batch: MicroBatch, *, replay: bool
) -> Iterator[RoutingMismatch]:
    """Within, every token goes to the experts that the batch names, weighted by the trainer's own
    scores; without `replay` they are only compared. Where none is named, the choice is free."""
    apart = RoutingMismatch("experts" in batch.columns)
    if not apart.asked:
        yield apart
        return
    said_SLK = batch.columns["experts"]
    cut, branches = batch.attn_metadata.context_shard, shared_prefix_metadata(network, batch)
    here = slice(None) if cut is None else cut.local_slice
    said_TLK = said_SLK[here if branches is None else branches.query_T].long()
    routers = [m for layer in network.layers for m in layer.modules() if isinstance(m, TopKRouter)]
    if said_TLK.shape[1] != len(routers):
        raise ValueError(f"experts of {said_TLK.shape[1]} layers for {len(routers)} routers")
    if branches is not None:
        apart.every = branches.expand_queries
    handles = [
        router.register_forward_hook(_rerouted(said_TLK[:, place], apart, replay))
        for place, router in enumerate(routers)
    ]
    try:
        yield apart
    finally:
        for handle in handles:
            handle.remove()


def _rerouted(
    said_TK: Tensor, apart: RoutingMismatch, replay: bool
) -> Callable[[nn.Module, Any, Routing], Routing]:
    known_T1 = said_TK[:, :1] >= 0

    def hook(router: nn.Module, _: Any, own: Routing) -> Routing:
        assert isinstance(router, TopKRouter)
        differs_T = (own.expert_TK != said_TK).any(1) & known_T1.squeeze(1)
        apart.tokens.append(apart.every(differs_T).sum())
        if not replay:
            return own
        expert_TK = torch.where(known_T1, said_TK, own.expert_TK)
        weight_TK = own.score_TE.gather(1, expert_TK)
        if router.moe.normalize:
            weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
        return Routing(expert_TK, weight_TK * router.moe.scale, own.score_TE)

    return hook
