"""Policy objective for reinforcement learning: packs samples and applies a token loss.

The loss itself comes from the caller, as a function of log-probabilities (`TokenLossFn`). This
module does what needs the model: packing samples, computing log-probabilities of sampled tokens,
replaying the engine's expert routing, and counting the tokens that gradients come from.

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
from paddock.train.objective import Losses, mtp_loss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicySample:
    """A training sample with its loss weight, teacher log-probabilities and engine routing.

    Arrays have one row per token.
    """

    sample: TrainSample
    weight: float  # of each trained token in the loss of the batch
    temperature: float = 1.0  # of the log-probabilities
    teacher_logprob_S: NDArray[np.float32] | None = None
    teacher_weight: float = 0.0  # of the distillation term
    routed_experts_SLK: NDArray[np.int16] | None = None  # by the engine; -1: not recorded


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTokens:
    """Log-probabilities and weights of the trained tokens of a micro batch."""

    logprob_N: Tensor  # of the policy, with gradient
    old_logprob_N: Tensor  # of the policy before the first step on this batch
    rollout_logprob_N: Tensor  # of the engine
    advantage_N: Tensor
    teacher_logprob_N: Tensor
    teacher_weight_N: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenLossOutput:
    """Loss of each token, and per-token metrics to be averaged."""

    loss_N: Tensor
    metrics: Mapping[str, Tensor]


class TokenLossFn(Protocol):
    """A policy-gradient loss as a function of log-probabilities."""

    def __call__(self, tokens: PolicyTokens, /) -> TokenLossOutput: ...


@dataclass(frozen=True, slots=True)
class MTPTraining:
    """Next-token training of the MTP layer on the sampled tokens, for speculative decoding.

    Gradients stop at the trunk, the embedding and the head: the policy is not changed by it.
    """

    depths: int
    coef: float

    def loss(
        self, network: Transformer, hidden_TD: Tensor, batch: MicroBatch, counts: TokenCounts
    ) -> Tensor:
        step = network.make_context(batch.attn_metadata)
        ahead = network.mtp_forward(hidden_TD, batch.token_S, step, self.depths, detach_trunk=True)
        states = [state_TD for state_TD, _ in ahead]
        return mtp_loss(network.head.weight.detach(), states, batch, counts)


class PolicyObjective:
    """Weighted sum of a token loss over the trained tokens, and the MTP loss if `mtp` is set.

    With `replay`, tokens go to the experts that the engine routed them to. `token_stats` counts the
    tokens that gradients come from.
    """

    def __init__(
        self, loss: TokenLossFn, *, replay: bool = False, mtp: MTPTraining | None = None
    ) -> None:
        self.loss, self.replay, self.mtp = loss, replay, mtp
        self.token_stats = GradientTokenCounter()

    def __call__(
        self,
        network: Transformer,
        batch: MicroBatch,
        counts: TokenCounts,
        progress: float,  # noqa: ARG002
    ) -> Losses:
        with replay_routing(network, batch, replay=self.replay) as mismatch:
            hidden_TD = _hidden(network, batch)
        logprob_T = _token_logprobs(network, batch, hidden_TD)
        position_N = (batch.targets(1) >= 0).nonzero().squeeze(1)

        def column(name: str) -> Tensor:
            """[N] a column of the batch at the trained tokens."""
            return batch.shift_ahead(batch.columns[name], 1, fill=0)[position_N]

        logprob_N = self.token_stats.track(logprob_T[position_N], column("sample_index"))
        rollout_logprob_N = column("rollout_logprobs")
        output = self.loss(
            PolicyTokens(
                logprob_N,
                column("old_logprobs") if "old_logprobs" in batch.columns else logprob_N.detach(),
                rollout_logprob_N,
                column("advantages"),
                column("teacher_logprobs"),
                column("teacher_weight"),
            )
        )
        total = (column("token_weight") * output.loss_N).sum()
        parts = {"policy_loss": total.detach()}
        for name, value_N in {
            **logprob_diff_metrics(logprob_N.detach(), rollout_logprob_N),
            **output.metrics,
        }.items():
            parts[name] = value_N.detach().sum() / counts.targets[0]
        if self.mtp is not None:
            ahead_loss = self.mtp.loss(network, hidden_TD, batch, counts)
            total = total + self.mtp.coef * ahead_loss
            parts["mtp_loss"] = ahead_loss.detach()
        if mismatch.recorded:
            parts["routing_mismatch"] = mismatch.mean(counts.tokens)
        return Losses(total, parts)


def logprob_diff_metrics(logprob_N: Tensor, rollout_logprob_N: Tensor) -> dict[str, Tensor]:
    """Train-inference mismatch and entropy, per sampled token.

    The KL is the k3 estimate from the engine's samples. The mean of -log p over sampled tokens
    estimates the entropy of the policy.
    """
    diff_N = logprob_N - rollout_logprob_N
    return {
        "logprob_diff": diff_N.abs(),
        "train_inference_kl": diff_N.clamp(-20, 20).exp() - 1 - diff_N,
        "entropy": -rollout_logprob_N,
    }


def compute_token_logprobs(network: Transformer, batch: MicroBatch) -> Tensor:
    """[T] log-probability of each token's successor, at the temperature it was sampled with.

    Meaningful only where the successor is trained.
    """
    return _token_logprobs(network, batch, _hidden(network, batch))


def _token_logprobs(network: Transformer, batch: MicroBatch, hidden_TD: Tensor) -> Tensor:
    temperature_T = batch.shift_ahead(batch.columns["temperature"], 1, fill=1.0)
    if bool((temperature_T != 1).any()):
        # Logits are linear in the hidden state: dividing it serves every kernel.
        hidden_TD = hidden_TD / temperature_T.unsqueeze(1).to(hidden_TD.dtype)
    return token_logprobs(hidden_TD, network.head.weight, batch.targets(1))


def _hidden(network: Transformer, batch: MicroBatch) -> Tensor:
    """Hidden states of all tokens; the shared prefix of a group's samples is computed once."""
    shared = shared_prefix_metadata(network, batch)
    if shared is None:
        return network(batch.token_T, batch.attn_metadata).hidden_TD
    assert shared.query_T is not None
    return shared.expand_queries(network(batch.token_S[shared.query_T], shared).hidden_TD)


def shared_prefix_metadata(network: Transformer, batch: MicroBatch) -> AttentionMetadata | None:
    """Metadata with shared prefixes; None if there are none, or with linear-attention layers.

    A recurrent state cannot branch.
    """
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
    """[S] log-probabilities of the trained tokens under the model, 0 elsewhere."""
    logprob_S = np.zeros(len(batch.token_T), np.float32)
    start = 0
    for micro in iter_micro_batches(batch, network.embed.weight.device, micro_tokens):
        with replay_routing(network, micro, replay=replay):
            logprob_T = compute_token_logprobs(network, micro)
        position_N = (micro.targets(1) >= 0).nonzero().squeeze(1)
        # A token's log-probability is computed at the position before it.
        targets = start + 1 + position_N.cpu().numpy()
        logprob_S[targets] = logprob_T[position_N].float().cpu().numpy()
        start += len(micro.token_S)
    return logprob_S


def pack_samples(
    policy_samples: Sequence[PolicySample], old_logprob_S: NDArray[np.float32] | None = None
) -> PolicyBatch:
    """Pack samples in the given order.

    `old_logprob_S` are the policy's log-probabilities before the first of several steps on them.
    """
    samples = [each.sample for each in policy_samples]
    lengths = tuple(len(sample.token_ids) for sample in samples)

    def spread(values: Sequence[float], dtype: Any = np.float32) -> NDArray[Any]:
        """Repeat a value per sample for each of its tokens."""
        return np.repeat(np.array(values, dtype), lengths)

    columns: dict[str, NDArray[Any]] = {
        "rollout_logprobs": _concatenate([s.logprobs for s in samples], np.float32),
        "advantages": _concatenate([s.advantages for s in samples], np.float32),
        "token_weight": spread([each.weight for each in policy_samples]),
        "temperature": spread([each.temperature for each in policy_samples]),
        "teacher_weight": spread([each.teacher_weight for each in policy_samples]),
        "sample_index": spread(range(len(samples)), np.int64),
        "teacher_logprobs": np.concatenate(
            [
                np.zeros(len(each.sample.token_ids), np.float32)
                if each.teacher_logprob_S is None
                else each.teacher_logprob_S.astype(np.float32)
                for each in policy_samples
            ]
        ),
    }
    if old_logprob_S is not None:
        columns["old_logprobs"] = old_logprob_S
    if (experts := _routed_experts(policy_samples)) is not None:
        columns["routed_experts"] = experts
    loss_mask_S = _concatenate([s.loss_mask for s in samples], np.bool_)
    return PolicyBatch(
        token_T=_concatenate([s.token_ids for s in samples], np.int32),
        loss_mask_T=loss_mask_S,
        lengths=lengths,
        sources=("rollout",) * len(samples),
        num_targets=int(loss_mask_S.sum()),
        columns=columns,
    )


def _concatenate(rows: Sequence[Sequence[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.array(row, dtype) for row in rows])


def _routed_experts(samples: Sequence[PolicySample]) -> NDArray[np.int16] | None:
    """[S, L, K] the engine's routing, -1 where it is not recorded; None if no sample has any."""
    known = next(
        (each.routed_experts_SLK for each in samples if each.routed_experts_SLK is not None), None
    )
    if known is None:
        return None
    rows = []
    for each in samples:
        experts_SLK = np.full((len(each.sample.token_ids), *known.shape[1:]), -1, np.int16)
        if each.routed_experts_SLK is not None:
            experts_SLK[: len(each.routed_experts_SLK)] = each.routed_experts_SLK
        rows.append(experts_SLK)
    return np.concatenate(rows)


class GradientTokenCounter:
    """Counts, during the backward pass, the tokens of each sample that gradients come from.

    Counted there and not in the batch, so that the check cannot miss a token that was packed but
    never reached the loss.
    """

    def __init__(self) -> None:
        self.seen = torch.zeros(0, dtype=torch.int64)

    def reset(self, samples: int) -> None:
        """Start counting for a batch of `samples`."""
        self.seen = torch.zeros(samples, dtype=torch.int64)

    def track(self, logprob_N: Tensor, sample_N: Tensor) -> Tensor:
        """`logprob_N` itself, counted by its sample when gradients flow through it."""
        if not logprob_N.requires_grad:
            return logprob_N
        tracked: Tensor = _CountBackward.apply(logprob_N, sample_N, self._count)
        return tracked

    def _count(self, sample_N: Tensor) -> None:
        self.seen += sample_N.cpu().bincount(minlength=len(self.seen))


class _CountBackward(torch.autograd.Function):
    """Identity that calls `count` in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logprob_N: Tensor, sample_N: Tensor, count: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.sample_N, ctx.count = sample_N, count
        return logprob_N.view_as(logprob_N)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        ctx.count(ctx.sample_N)
        return grad_N, None, None


class RoutingMismatch:
    """Fraction of tokens that the trainer's routers send to other experts than the engine did."""

    def __init__(self, recorded: bool) -> None:
        self.recorded = recorded  # whether the batch holds the engine's routing
        self.tokens: list[Tensor] = []  # by layer, how many were routed differently
        # Counts a token of a shared prefix once per sample.
        self.expand: Callable[[Tensor], Tensor] = lambda x_T: x_T

    def mean(self, tokens: int) -> Tensor:
        """Mean over layers of the fraction of `tokens` that differ."""
        return torch.stack(self.tokens).float().mean() / tokens


@contextmanager
def replay_routing(
    network: Transformer, batch: MicroBatch, *, replay: bool
) -> Iterator[RoutingMismatch]:
    """Route tokens to the experts recorded in the batch while the context is active.

    Expert weights are the trainer's own scores. Tokens without recorded experts are routed as
    usual. Without `replay` the routing is only compared. Raises ValueError if the batch has another
    number of MoE layers than the model.
    """
    mismatch = RoutingMismatch("routed_experts" in batch.columns)
    if not mismatch.recorded:
        yield mismatch
        return
    expert_SLK = batch.columns["routed_experts"]
    shard, shared = batch.attn_metadata.context_shard, shared_prefix_metadata(network, batch)
    local = slice(None) if shard is None else shard.local_slice
    expert_TLK = expert_SLK[local if shared is None else shared.query_T].long()
    routers = [m for layer in network.layers for m in layer.modules() if isinstance(m, TopKRouter)]
    if expert_TLK.shape[1] != len(routers):
        raise ValueError(
            f"the batch has routing of {expert_TLK.shape[1]} layers, the model has "
            f"{len(routers)} routers"
        )
    if shared is not None:
        mismatch.expand = shared.expand_queries
    handles = [
        router.register_forward_hook(_replay_hook(expert_TLK[:, number], mismatch, replay))
        for number, router in enumerate(routers)
    ]
    try:
        yield mismatch
    finally:
        for handle in handles:
            handle.remove()


def _replay_hook(
    recorded_TK: Tensor, mismatch: RoutingMismatch, replay: bool
) -> Callable[[nn.Module, Any, Routing], Routing]:
    """Forward hook of a router: counts differing tokens and, with `replay`, replaces its choice."""
    known_T1 = recorded_TK[:, :1] >= 0

    def hook(router: nn.Module, _: Any, own: Routing) -> Routing:
        assert isinstance(router, TopKRouter)
        differs_T = (own.expert_TK != recorded_TK).any(1) & known_T1.squeeze(1)
        mismatch.tokens.append(mismatch.expand(differs_T).sum())
        if not replay:
            return own
        expert_TK = torch.where(known_T1, recorded_TK, own.expert_TK)
        weight_TK = own.score_TE.gather(1, expert_TK)
        if router.moe.normalize:
            weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
        return Routing(expert_TK, weight_TK * router.moe.scale, own.score_TE)

    return hook
