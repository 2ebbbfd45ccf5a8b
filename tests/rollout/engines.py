"""Fake engines that log every prompt and completion exactly."""

import asyncio
import struct
from dataclasses import dataclass, field
from functools import cache
from random import Random

from paddock.records import Completion, Segment
from paddock.rollout.client import InferenceRequest, NonStreamingClient, OutputDelta, RequestOutput
from paddock.text import SpecialToken, Tokenizer, train_tokenizer
from paddock.text.glm_renderer import GlmRenderer
from paddock.text.messages import parse_tools
from tests.text.conversations import MARKERS, TOOLS, WORDS, text, value

SPEC = parse_tools(TOOLS)


@cache
def tokenizer() -> Tokenizer:
    """Byte-level with a few merges, so that a text has many tokenizations."""
    return train_tokenizer([" ".join(WORDS), "the pony is in the box", "12 C."] * 20, vocab=360)


@cache
def renderer(version: str = "5") -> GlmRenderer:
    return GlmRenderer(tokenizer(), version=version)


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


@dataclass(frozen=True)
class Logged:
    session: str
    prompt: tuple[int, ...]
    completion: Completion


def completion(ids, rng=None, *, finish="stop", version=0, forced=()) -> Completion:
    """A reply of these tokens, sampled by up to three versions of the weights."""
    rng = rng or Random(0)
    cuts = sorted(rng.sample(range(1, len(ids)), min(rng.randint(0, 2), len(ids) - 1)))
    starts, ends = [0, *cuts], [*cuts, len(ids)]
    segments = [
        Segment(version + i, e - s) for i, (s, e) in enumerate(zip(starts, ends, strict=True))
    ]
    return Completion(
        token_ids=tuple(ids),
        logprobs=tuple(float32(-rng.random() * 5) for _ in ids),
        versions=tuple(segments),
        finish=finish,
        forced=tuple(forced),
    )


@dataclass
class ScriptedEngine(NonStreamingClient):
    """Returns scripted replies in order."""

    replies: list[Completion]
    log: list[Logged] = field(default_factory=list)

    async def generate(self, request: InferenceRequest) -> RequestOutput:
        await asyncio.sleep(0)
        found = self.replies[len(self.log)]
        self.log.append(Logged(request.session_id, tuple(request.token_ids), found))
        return RequestOutput(completion=found, prompt_tokens=len(request.token_ids))


@dataclass
class RandomEngine(NonStreamingClient):
    """Random replies of every shape: with or without reasoning, parallel and malformed calls, any
    unicode, non-canonical tokens, every finish reason. The same request gets the same reply."""

    seed: int = 0
    log: list[Logged] = field(default_factory=list)
    pieces: int = 1  # number of deltas a reply is streamed in

    async def generate(self, request: InferenceRequest) -> RequestOutput:
        found = self.sample_completion(request)
        self.log.append(Logged(request.session_id, tuple(request.token_ids), found))
        return RequestOutput(completion=found, prompt_tokens=len(request.token_ids))

    async def stream(self, request: InferenceRequest):
        answer = await self.generate(request)
        done = answer.completion
        versions, count = done.token_versions, len(done.token_ids)
        cuts = sorted({*(count * i // self.pieces for i in range(1, self.pieces)), count})
        start = 0
        for end in cuts:
            await asyncio.sleep(0)
            yield OutputDelta(
                token_ids=done.token_ids[start:end],
                logprobs=done.logprobs[start:end],
                version=versions[end - 1],
                output=answer if end == count else None,
            )
            start = end

    def sample_completion(self, request: InferenceRequest) -> Completion:
        rng = Random(f"{self.seed} {request.session_id} {list(request.token_ids)}")
        ids = list(reply_ids(rng, thinking=self._thinks(request)))
        stop = rng.choice(
            [SpecialToken.USER, SpecialToken.OBSERVATION, SpecialToken.ENDOFTEXT, None]
        )
        ids += [] if stop is None else [tokenizer().special_token_ids[stop]]
        ids = ids or [7]
        finish = "length" if stop is None else "stop"
        forced = sorted(rng.sample(range(len(ids)), rng.choice([0, 0, 1])))
        version = rng.randint(0, 50)
        return completion(ids, rng, finish=finish, version=version, forced=forced)

    def _thinks(self, request: InferenceRequest) -> bool:
        return request.token_ids[-1] == tokenizer().special_token_ids[SpecialToken.THINK_OPEN]


def reply_ids(rng: Random, *, thinking: bool):
    """Tokens as a model might sample them."""
    specials, words = tokenizer().special_token_ids, (*WORDS, *MARKERS)
    if thinking:
        yield from odd_ids(rng, text(rng, words))
        if rng.random() < 0.9:
            yield specials[SpecialToken.THINK_CLOSE]
    yield from odd_ids(rng, text(rng, words))
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        yield specials[SpecialToken.TOOL_CALL_OPEN]
        yield from odd_ids(rng, rng.choice(["get_weather", "now", "ponies", "nobody"]))
        for key in rng.sample(["city", "days", "options", "\u00fcber"], rng.randint(0, 3)):
            yield specials[SpecialToken.ARG_KEY_OPEN]
            yield from odd_ids(rng, key)
            yield specials[SpecialToken.ARG_KEY_CLOSE]
            yield specials[SpecialToken.ARG_VALUE_OPEN]
            yield from odd_ids(rng, str(value(rng, WORDS)))
            yield specials[SpecialToken.ARG_VALUE_CLOSE]
        if rng.random() < 0.9:
            yield specials[SpecialToken.TOOL_CALL_CLOSE]
    if rng.random() < 0.2:
        yield from odd_ids(rng, text(rng, words))


def odd_ids(rng: Random, content: str) -> list[int]:
    """The text as tokens: canonical, character by character, or split at a random point."""
    encode = tokenizer().encode
    match rng.randrange(3):
        case 0:
            return encode(content, specials=False)
        case 1:
            return [i for letter in content for i in encode(letter, specials=False)]
    cut = rng.randint(0, len(content))
    return encode(content[:cut], specials=False) + encode(content[cut:], specials=False)
