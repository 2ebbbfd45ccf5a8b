"""/tokenize, /detokenize, /apply-template and /tokenizer_info."""

from typing import Any

from starlette.requests import Request

from paddock.api import parse_body
from paddock.api import tokenize as api_tokenize
from paddock.http import JsonRouter
from paddock.records import ApiError
from paddock.serve.chat_service import ChatService


class TokenizerRoutes:
    def __init__(self, service: ChatService) -> None:
        self.service = service

    def register(self, router: JsonRouter) -> None:
        for prefix in ("", "/v1"):
            router.add_route(f"{prefix}/tokenize", self.tokenize, body=api_tokenize.TokenizeBody)
            router.add_route(
                f"{prefix}/detokenize", self.detokenize, body=api_tokenize.DetokenizeBody
            )
        router.add_route(
            "/apply-template", self.apply_template, body=api_tokenize.ApplyTemplateBody
        )
        router.add_route("/tokenizer_info", self.tokenizer_info, methods=("GET",))

    async def tokenize(self, _http: Request, value: Any) -> Any:
        body, max_tokens = (
            parse_body(api_tokenize.TokenizeBody, value),
            self.service.max_tokenize_tokens,
        )
        self.service.check_model(body.model)
        if body.prompt is None:
            ids = await self.service.render_prompt(
                api_tokenize.parse_template_request(body, self.service.default_thinking),
                max_tokens=max_tokens,
            )
            return self._response(ids, body)
        # As in /v1/completions: special tokens in the text are encoded as such, none are added.
        if isinstance(body.prompt, str):
            return self._response(
                await self.service.tokenize_prompt(body.prompt, max_tokens=max_tokens), body
            )
        batch = [
            await self.service.tokenize_prompt(text, max_tokens=max_tokens) for text in body.prompt
        ]
        return {
            "tokens": batch,
            "count": [len(ids) for ids in batch],
            "max_model_len": self.service.capacity.context_length,
        }

    def _response(self, ids: Any, body: api_tokenize.TokenizeBody) -> dict[str, Any]:
        token_strs = (
            [self.service.token_decoder.text(i) for i in ids] if body.return_token_strs else None
        )
        return {
            "tokens": list(ids),
            "count": len(ids),
            "max_model_len": self.service.capacity.context_length,
            "token_strs": token_strs,
        }

    async def detokenize(self, _http: Request, value: Any) -> Any:
        body = parse_body(api_tokenize.DetokenizeBody, value)
        self.service.check_model(body.model)
        skip = bool(body.skip_special_tokens)
        batched = bool(body.tokens) and isinstance(body.tokens[0], list)
        batch: list[list[int]] = body.tokens if batched else [body.tokens]  # type: ignore[assignment,list-item]
        for ids in batch:
            invalid = next((i for i in ids if not 0 <= i < self.service.vocab), None)
            if invalid is not None:
                raise ApiError(
                    f"tokens must be in [0, {self.service.vocab}), got {invalid}", param="tokens"
                )
        texts = [self.service.tokenizer.decode(ids, skip_special=skip) for ids in batch]
        text: str | list[str] = texts if batched else texts[0]
        return {"prompt": text, "text": text}

    async def apply_template(self, _http: Request, value: Any) -> Any:
        request = api_tokenize.parse_template_request(
            parse_body(api_tokenize.ApplyTemplateBody, value), self.service.default_thinking
        )
        ids = await self.service.render_prompt(request, max_tokens=self.service.max_tokenize_tokens)
        return {"prompt": self.service.tokenizer.decode(ids), "tokens": list(ids)}

    async def tokenizer_info(self, _http: Request, _value: Any) -> Any:
        template = getattr(self.service.renderer, "template", None)
        return api_tokenize.tokenizer_info(
            self.service.tokenizer, template.source if template else None
        )
