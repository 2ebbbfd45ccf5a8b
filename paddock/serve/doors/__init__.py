"""One file a dialect: its bodies to the engine, the engine's answers to its replies.

anthropic.py    messages and count_tokens
control.py      caches, aborts, pauses and weights
facts.py        what this server is and how it is
inference.py    vLLM's tokens in, tokens out
native.py       SGLang's /generate
openai.py       chat and text completions
responses.py    OpenAI's Responses
tokens.py       the tokenizer's own endpoints
"""
