"""Log-probabilities beyond the sampled token: prompt tokens, top-k and requested token ids.

T prompt tokens, N rows, V vocabulary, D hidden.
"""

import torch
from torch import Tensor

from paddock.engine.request import TokenLogprob
from paddock.engine.scheduler import ScheduledSequence, ScheduledStep
from paddock.kernels.workspace import chunks
from paddock.model import Transformer


def score_prompts(
    step: ScheduledStep, hidden_TD: Tensor, network: Transformer, logits_chunk_bytes: int
) -> None:
    """Append the prompt log-probabilities requested in this step."""
    first = 0
    for each in step.scheduled:
        if each.sequence.next_prompt_logprob is not None:
            _score(each, hidden_TD[first : first + each.tokens], network, logits_chunk_bytes)
        first += each.tokens


def _score(
    scheduled: ScheduledSequence, hidden_TD: Tensor, network: Transformer, logits_chunk_bytes: int
) -> None:
    """Append the log-probabilities of the prompt tokens that these hidden states predict."""
    sequence, request = scheduled.sequence, scheduled.sequence.request
    start = sequence.next_prompt_logprob
    if start == 0:  # nothing precedes the first token
        sequence.prompt_logprobs.append(None)
        sequence.prompt_top_logprobs.append(None)
        sequence.prompt_requested_logprobs.append(None)
        start = sequence.next_prompt_logprob
    if start is None:
        return
    stop = min(scheduled.stop + 1, sequence.num_prompt)
    hidden_TD = hidden_TD[start - 1 - scheduled.start : stop - 1 - scheduled.start]
    target_T = torch.tensor(sequence.tokens[start:stop], device=hidden_TD.device)
    row_bytes = 8 * network.config.vocab
    for chunk in chunks(len(target_T), row_bytes, logits_chunk_bytes):
        logprob_TV = network.head(hidden_TD[chunk]).float().log_softmax(-1)
        found = logprob_TV.gather(1, target_T[chunk].unsqueeze(1)).squeeze(1)
        sequence.prompt_logprobs += found.tolist()
        sequence.prompt_top_logprobs += top_logprobs(logprob_TV, request.top_logprobs)
        sequence.prompt_requested_logprobs += logprobs_of_ids(logprob_TV, request.logprob_token_ids)


def top_logprobs(logprob_NV: Tensor, count: int) -> list[TokenLogprob]:
    """The `count` most likely tokens of each row, most likely first."""
    if not count:
        return []
    best = logprob_NV.topk(min(count, logprob_NV.shape[1]), dim=-1)
    return [
        TokenLogprob(tuple(ids), tuple(values))
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def logprobs_of_ids(logprob_NV: Tensor, token_ids: tuple[int, ...]) -> list[TokenLogprob]:
    """The log-probabilities of these tokens in each row."""
    if not token_ids:
        return []
    picked_NA = logprob_NV[:, torch.tensor(token_ids, device=logprob_NV.device)]
    return [TokenLogprob(token_ids, tuple(values)) for values in picked_NA.tolist()]
