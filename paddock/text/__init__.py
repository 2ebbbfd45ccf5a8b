"""Text as the model sees it.

gguf.py  the tokenizer inside a GGUF file
"""
