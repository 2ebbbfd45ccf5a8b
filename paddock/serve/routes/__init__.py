"""One file a dialect: its bodies to the engine, the engine's answers to its replies.

anthropic.py    messages and count_tokens
admin.py        caches, aborts, pauses and weights
info.py         what this server is and how it is
vllm.py         vLLM's tokens in, tokens out
sglang.py       SGLang's /generate
openai.py       chat and text completions
responses.py    OpenAI's Responses
tokenize.py     the tokenizer's own endpoints
"""
