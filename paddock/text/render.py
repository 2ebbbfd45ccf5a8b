"""The renderer for a tokenizer."""

import json

from paddock.text.folder import FolderRenderer
from paddock.text.glm import GlmRenderer
from paddock.text.rendered import Renderer
from paddock.text.special import Special
from paddock.text.template import (
    FILE,
    ChatTemplateError,
    Template,
    Version,
    chat_template,
    version_of,
)
from paddock.text.tokenizer import CONFIG, Tokenizer


def renderer_for(tokenizer: Tokenizer, *, version: Version | None = None) -> Renderer:
    """How this tokenizer's model reads conversations.

    With `version`, GLM-5's template of that version. Else the template among the tokenizer's files,
    which may turn out to be one of GLM-5's; else GLM-5's first, if the tokenizer has its markers.
    """
    if version is not None:
        return GlmRenderer(tokenizer, version=version)
    template = Template.of(tokenizer)
    if template is not None:
        known = version_of(template)
        if known is not None:
            return GlmRenderer(tokenizer, version=known)
        return FolderRenderer(tokenizer, template)
    if Special.ASSISTANT in tokenizer.specials:
        return GlmRenderer(tokenizer)
    raise ChatTemplateError(f"tokenizer '{tokenizer.name}' has no chat template")


def with_chat_template(tokenizer: Tokenizer, version: Version) -> Tokenizer:
    """The tokenizer with GLM-5's template among its files, for `save` to lay beside the weights."""
    files = {**tokenizer.files, FILE: chat_template(version).encode()}
    config = json.loads(files[CONFIG])
    if config.pop("chat_template", None) is not None:  # another one, in an older place
        files[CONFIG] = json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
    return Tokenizer(files, name=tokenizer.name)
