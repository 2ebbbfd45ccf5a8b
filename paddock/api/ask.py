"""What is asked of us, once a dialect's words are taken away."""

from dataclasses import dataclass

from paddock.records import Message, Sampling, ToolSpec
from paddock.text.template import UNSAID, Thinking

Prompt = tuple[int, ...] | str  # a text is tokenized as it is, without any template


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What every request says, whatever it is about."""

    model: str | None = None
    id: str | None = None
    sampling: Sampling
    stream: bool = False
    priority: int = 0
    salt: str = ""  # requests with different salts share no cached prefix
    session: str | None = None  # requests of one session go to one replica
    replica: int | None = None  # the replica it must go to
    top_logprobs: int | None = None  # None: no log-probabilities; 0: of the chosen tokens alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk(Ask):
    """A conversation to be continued: OpenAI's chat and Responses, Anthropic's messages."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()  # shown to the model; empty where it may not call any
    skipped_tools: tuple[str, ...] = ()  # kinds of tools that we do not know
    thinking: Thinking = UNSAID
    prompt_ids: tuple[int, ...] | None = None  # in place of the rendered conversation
    continues: bool = False  # the last message is a reply to be gone on with
    must_call: bool = False  # an answer without a call is not wanted
    only_tool: str | None = None  # the one that may be called
    fits_context: bool = False  # a reply longer than the context allows is cut, not refused
    n: int = 1
