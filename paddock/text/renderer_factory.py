"""The renderer for a tokenizer."""

import json

from paddock.text.chat_template import (
    CHAT_TEMPLATE_FILE,
    ChatTemplate,
    ChatTemplateError,
    GlmVersion,
    detect_glm_version,
    glm_chat_template_source,
)
from paddock.text.chat_template_renderer import ChatTemplateRenderer
from paddock.text.glm_renderer import GlmRenderer
from paddock.text.renderer import Renderer
from paddock.text.special_tokens import SpecialToken
from paddock.text.tokenizer import TOKENIZER_CONFIG_FILE, Tokenizer


def get_renderer(tokenizer: Tokenizer, *, version: GlmVersion | None = None) -> Renderer:
    """The renderer for this tokenizer's model.

    With `version`, GLM-5's template of that version. Otherwise the template in the tokenizer's
    files (GlmRenderer if it is one of GLM-5's), otherwise GLM-5's first template if the tokenizer
    has its special tokens. Raises ChatTemplateError if there is none.
    """
    if version is not None:
        return GlmRenderer(tokenizer, version=version)
    template = ChatTemplate.from_tokenizer(tokenizer)
    if template is not None:
        known = detect_glm_version(template)
        if known is not None:
            return GlmRenderer(tokenizer, version=known)
        return ChatTemplateRenderer(tokenizer, template)
    if SpecialToken.ASSISTANT in tokenizer.special_token_ids:
        return GlmRenderer(tokenizer)
    raise ChatTemplateError(f"tokenizer '{tokenizer.name}' has no chat template")


def with_chat_template(tokenizer: Tokenizer, version: GlmVersion) -> Tokenizer:
    """The tokenizer with GLM-5's template among its files, for `save`."""
    files = {**tokenizer.files, CHAT_TEMPLATE_FILE: glm_chat_template_source(version).encode()}
    config = json.loads(files[TOKENIZER_CONFIG_FILE])
    if config.pop("chat_template", None) is not None:  # an older template in the config
        files[TOKENIZER_CONFIG_FILE] = (
            json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
        )
    return Tokenizer(files, name=tokenizer.name)
