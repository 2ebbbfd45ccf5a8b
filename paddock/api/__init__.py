"""Public JSON shapes of the OpenAI, Anthropic, SGLang and vLLM APIs <-> records.

anthropic_request.py       Anthropic Messages: request bodies
anthropic_format.py        Anthropic Messages: responses and stream events
body.py                    validation of request bodies
delta_parser.py            engine output deltas into reasoning, content and tool calls
errors.py                  error bodies of each API
formatter.py               one completion in the shape of an API, whole or streamed
openai_chat_request.py     OpenAI Chat Completions: request bodies
openai_chat_format.py      OpenAI Chat Completions: responses and stream chunks
openai_completions.py      OpenAI Completions, with echo and log-probabilities
openai_responses_request.py  OpenAI Responses: request bodies
openai_responses_format.py  OpenAI Responses: responses and stream events
openai_usage.py            token usage as OpenAI counts it
protocol.py                the API that a path belongs to
request.py                 requests independent of the API they came from
sampling_fields.py         sampling fields of request bodies into SamplingParams
sglang_request.py          SGLang /generate: request bodies
sglang_client.py           SGLang /generate: the client side
sglang_format.py           SGLang /generate: responses and stream chunks
thinking_options.py        the fields with which clients control thinking
token_decoder.py           the text of single tokens, for log-probabilities
tokenize.py                /tokenize, /detokenize and /tokenizer_info
vllm_generate.py           vLLM /inference/v1/generate
"""

from paddock.api import (
    anthropic_request,
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
from paddock.api.delta_parser import DeltaParser
from paddock.api.openai_usage import openai_usage
from paddock.api.protocol import protocol_for_path
from paddock.api.request import (
    ApiRequest,
    ChatRequest,
    Prompt,
    context_length_error,
    fit_to_context,
)
from paddock.api.sampling_fields import (
    SamplingFields,
    parse_response_format,
    parse_sampling_params,
)
from paddock.api.thinking_options import ThinkingOptions, from_template_kwargs
from paddock.api.token_decoder import TokenDecoder

__all__ = [
    "ApiRequest",
    "ChatRequest",
    "DeltaParser",
    "Prompt",
    "RequestBody",
    "SamplingFields",
    "ThinkingOptions",
    "TokenDecoder",
    "anthropic_request",
    "context_length_error",
    "fit_to_context",
    "formatter",
    "from_template_kwargs",
    "openai_chat_request",
    "openai_completions",
    "openai_responses_request",
    "openai_usage",
    "parse_body",
    "parse_response_format",
    "parse_sampling_params",
    "protocol_for_path",
    "sglang_client",
    "sglang_format",
    "sglang_request",
    "tokenize",
    "vllm_generate",
]
