"""Public JSON shapes into records and back, and the HTTP manners that all doors share.

anthropic.py               Anthropic's messages: what is asked
anthropic_reply.py         Anthropic's messages: how it answers
ask.py                     what is asked of us, once a dialect's words are taken away
body.py                    bytes into checked fields
dialect.py                 what a handler returns or raises, told in the dialect of its path
errors.py                  what is wrong with a request, in each dialect
inference.py               vLLM's /inference/v1/generate
keys.py                    how clients send API keys, and how these are compared
knobs.py                   how clients say what is to be sampled
native.py                  SGLang's /generate: what is asked
native_client.py           SGLang's /generate from the other side
native_reply.py            SGLang's /generate: how it answers
openai_chat.py             OpenAI's chat completions: what is asked
openai_chat_reply.py       OpenAI's chat completions: how it answers
openai_completions.py      OpenAI's completions, with echo and log-probabilities
openai_responses.py        OpenAI's Responses: what is asked
openai_responses_reply.py  OpenAI's Responses: how it answers
openai_usage.py            tokens counted as OpenAI counts them
reply.py                   the engine's tokens into what was thought, said and called
spelling.py                single tokens as clients are shown them
sse.py                     server-sent events, and clients that leave
thinking.py                the ways in which clients ask for thinking, as one
tokens.py                  the tokenizer's own endpoints
voice.py                   one reply, told in a dialect, whole or as it comes
"""
