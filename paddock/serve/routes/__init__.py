"""Routes of the inference server, one file per API.

admin.py        cache flush, abort, pause and weight updates
anthropic.py    Anthropic Messages and count_tokens
info.py         chat page, health, metrics, model and server information
openai.py       OpenAI Chat Completions and Completions
responses.py    OpenAI Responses
sglang.py       SGLang /generate
tokenize.py     /tokenize, /detokenize, /apply-template and /tokenizer_info
vllm.py         vLLM /inference/v1/generate
"""
