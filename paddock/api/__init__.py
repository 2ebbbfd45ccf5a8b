"""Public JSON shapes into records and back, and the HTTP manners that all doors share.

anthropic_request.py       Anthropic's messages: what is asked
anthropic_format.py        Anthropic's messages: how it answers
request.py                 what is asked of us, once a dialect's words are taken away
body.py                    bytes into checked fields
dialect.py                 what a handler returns or raises, told in the dialect of its path
errors.py                  what is wrong with a request, in each dialect
vllm_generate.py           vLLM's /inference/v1/generate
keys.py                    how clients send API keys, and how these are compared
sampling_fields.py         how clients say what is to be sampled
sglang_request.py          SGLang's /generate: what is asked
sglang_client.py           SGLang's /generate from the other side
sglang_format.py           SGLang's /generate: how it answers
openai_chat_request.py     OpenAI's chat completions: what is asked
openai_chat_format.py      OpenAI's chat completions: how it answers
openai_completions.py      OpenAI's completions, with echo and log-probabilities
openai_responses_request.py  OpenAI's Responses: what is asked
openai_responses_format.py  OpenAI's Responses: how it answers
openai_usage.py            tokens counted as OpenAI counts them
delta_parser.py            the engine's tokens into what was thought, said and called
token_decoder.py           single tokens as clients are shown them
sse.py                     server-sent events, and clients that leave
thinking_options.py        the ways in which clients ask for thinking, as one
tokenize.py                the tokenizer's own endpoints
formatter.py               one reply, told in a dialect, whole or as it comes
"""

from paddock.api import (
    anthropic_request,
    dialect,
    formatter,
    openai_chat_request,
    openai_completions,
    openai_responses_request,
    sglang_client,
    sglang_format,
    sglang_request,
    tokenize,
    vllm_generate,
)
from paddock.api.body import RequestBody, parse_body
from paddock.api.delta_parser import DeltaParser, OutputDeltaLike, RequestOutputLike
from paddock.api.errors import ApiError
from paddock.api.openai_usage import openai_usage
from paddock.api.request import (
    ApiRequest,
    ChatRequest,
    Prompt,
    context_length_error,
    fit_to_context,
)
from paddock.api.sampling_fields import SamplingFields, parse_sampling_params
from paddock.api.thinking_options import ThinkingOptions, from_template_kwargs
from paddock.api.token_decoder import TokenDecoder, TokenLogprobLike

__all__ = [
    "ApiError",
    "ApiRequest",
    "ChatRequest",
    "DeltaParser",
    "OutputDeltaLike",
    "Prompt",
    "RequestBody",
    "RequestOutputLike",
    "SamplingFields",
    "ThinkingOptions",
    "TokenDecoder",
    "TokenLogprobLike",
    "anthropic_request",
    "context_length_error",
    "dialect",
    "fit_to_context",
    "formatter",
    "from_template_kwargs",
    "openai_chat_request",
    "openai_completions",
    "openai_responses_request",
    "openai_usage",
    "parse_body",
    "parse_sampling_params",
    "sglang_client",
    "sglang_format",
    "sglang_request",
    "tokenize",
    "vllm_generate",
]
