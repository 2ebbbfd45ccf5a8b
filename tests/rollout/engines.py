"""Engines that make replies up and write down, to the last bit, what they were asked and said."""

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
    """Byte-level, with a few merges, so that a text has many spellings in tokens."""
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


def completion(ids, chance=None, *, finish="stop", version=0, forced=()) -> Completion:
    """A reply of these tokens, sampled by up to three versions of the weights."""
    chance = chance or Random(0)
    cuts = sorted(chance.sample(range(1, len(ids)), min(chance.randint(0, 2), len(ids) - 1)))
    starts, ends = [0, *cuts], [*cuts, len(ids)]
    segments = [
        Segment(version + i, e - s) for i, (s, e) in enumerate(zip(starts, ends, strict=True))
    ]
    return Completion(
        token_ids=tuple(ids),
        logprobs=tuple(float32(-chance.random() * 5) for _ in ids),
        versions=tuple(segments),
        finish=finish,
        forced=tuple(forced),
    )


@dataclass
class Scripted(NonStreamingClient):
    """Says what it was told to say, reply after reply."""

    replies: list[Completion]
    log: list[Logged] = field(default_factory=list)

    async def generate(self, ask: InferenceRequest) -> RequestOutput:
        await asyncio.sleep(0)
        found = self.replies[len(self.log)]
        self.log.append(Logged(ask.session_id, tuple(ask.token_ids), found))
        return RequestOutput(completion=found, prompt_tokens=len(ask.token_ids))


@dataclass
class Chancy(NonStreamingClient):
    """Replies of every shape: thoughts or none, parallel calls, broken calls, any unicode, tokens
    that no tokenizer would choose, every way to stop. The same ask gets the same reply."""

    seed: int = 0
    log: list[Logged] = field(default_factory=list)
    pieces: int = 1  # in which a reply is streamed

    async def generate(self, ask: InferenceRequest) -> RequestOutput:
        found = self.made_up(ask)
        self.log.append(Logged(ask.session_id, tuple(ask.token_ids), found))
        return RequestOutput(completion=found, prompt_tokens=len(ask.token_ids))

    async def stream(self, ask: InferenceRequest):
        answer = await self.generate(ask)
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

    def made_up(self, ask: InferenceRequest) -> Completion:
        chance = Random(f"{self.seed} {ask.session_id} {list(ask.token_ids)}")
        ids = list(reply_ids(chance, thinking=self._thinks(ask)))
        stop = chance.choice(
            [SpecialToken.USER, SpecialToken.OBSERVATION, SpecialToken.ENDOFTEXT, None]
        )
        ids += [] if stop is None else [tokenizer().special_token_ids[stop]]
        ids = ids or [7]
        finish = "length" if stop is None else "stop"
        forced = sorted(chance.sample(range(len(ids)), chance.choice([0, 0, 1])))
        version = chance.randint(0, 50)
        return completion(ids, chance, finish=finish, version=version, forced=forced)

    def _thinks(self, ask: InferenceRequest) -> bool:
        return ask.token_ids[-1] == tokenizer().special_token_ids[SpecialToken.THINK_OPEN]


def reply_ids(chance: Random, *, thinking: bool):
    """Tokens as a model might sample them."""
    specials, words = tokenizer().special_token_ids, (*WORDS, *MARKERS)
    if thinking:
        yield from odd_ids(chance, text(chance, words))
        if chance.random() < 0.9:
            yield specials[SpecialToken.THINK_CLOSE]
    yield from odd_ids(chance, text(chance, words))
    for _ in range(chance.choice([0, 0, 1, 1, 2, 3])):
        yield specials[SpecialToken.TOOL_CALL_OPEN]
        yield from odd_ids(chance, chance.choice(["get_weather", "now", "ponies", "nobody"]))
        for key in chance.sample(["city", "days", "options", "\u00fcber"], chance.randint(0, 3)):
            yield specials[SpecialToken.ARG_KEY_OPEN]
            yield from odd_ids(chance, key)
            yield specials[SpecialToken.ARG_KEY_CLOSE]
            yield specials[SpecialToken.ARG_VALUE_OPEN]
            yield from odd_ids(chance, str(value(chance, WORDS)))
            yield specials[SpecialToken.ARG_VALUE_CLOSE]
        if chance.random() < 0.9:
            yield specials[SpecialToken.TOOL_CALL_CLOSE]
    if chance.random() < 0.2:
        yield from odd_ids(chance, text(chance, words))


def odd_ids(chance: Random, said: str) -> list[int]:
    """The text as tokens, spelled as usual, character by character, or in chance pieces."""
    encode = tokenizer().encode
    match chance.randrange(3):
        case 0:
            return encode(said, specials=False)
        case 1:
            return [i for letter in said for i in encode(letter, specials=False)]
    cut = chance.randint(0, len(said))
    return encode(said[:cut], specials=False) + encode(said[cut:], specials=False)
