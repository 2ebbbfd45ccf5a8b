"""The tokenizer's own endpoints."""

from typing import Any

from starlette.requests import Request

from paddock.api import parse_body
from paddock.api import tokenize as api_tokenize
from paddock.http import JsonRouter
from paddock.records import ApiError
from paddock.serve.chat_service import ChatService


class TokenizerRoutes:
    def __init__(self, hall: ChatService) -> None:
        self.hall = hall

    def register(self, doors: JsonRouter) -> None:
        for prefix in ("", "/v1"):
            doors.add_route(f"{prefix}/tokenize", self.tokenize, body=api_tokenize.TokenizeBody)
            doors.add_route(
                f"{prefix}/detokenize", self.detokenize, body=api_tokenize.DetokenizeBody
            )
        doors.add_route("/apply-template", self.apply_template, body=api_tokenize.ApplyTemplateBody)
        doors.add_route("/tokenizer_info", self.tokenizer_info, methods=("GET",))

    async def tokenize(self, _http: Request, value: Any) -> Any:
        body, most = parse_body(api_tokenize.TokenizeBody, value), self.hall.max_tokenize_tokens
        self.hall.check_model(body.model)
        if body.prompt is None:
            ids = await self.hall.render_prompt(
                api_tokenize.parse_template_request(body, self.hall.default_thinking), most=most
            )
            return self._shown(ids, body)
        # As /v1/completions reads text: markers that it spells are markers, nothing is added.
        if isinstance(body.prompt, str):
            return self._shown(await self.hall.tokenize_prompt(body.prompt, most=most), body)
        each = [await self.hall.tokenize_prompt(text, most=most) for text in body.prompt]
        return {
            "tokens": each,
            "count": [len(ids) for ids in each],
            "max_model_len": self.hall.capacity.context_length,
        }

    def _shown(self, ids: Any, body: api_tokenize.TokenizeBody) -> dict[str, Any]:
        spelled = [self.hall.spelling.text(i) for i in ids] if body.return_token_strs else None
        return {
            "tokens": list(ids),
            "count": len(ids),
            "max_model_len": self.hall.capacity.context_length,
            "token_strs": spelled,
        }

    async def detokenize(self, _http: Request, value: Any) -> Any:
        body = parse_body(api_tokenize.DetokenizeBody, value)
        self.hall.check_model(body.model)
        skip = bool(body.skip_special_tokens)
        many = bool(body.tokens) and isinstance(body.tokens[0], list)
        each: list[list[int]] = body.tokens if many else [body.tokens]  # type: ignore[assignment,list-item]
        for ids in each:
            wrong = next((i for i in ids if not 0 <= i < self.hall.vocab), None)
            if wrong is not None:
                raise ApiError(f"tokens: {wrong} is not in [0, {self.hall.vocab})", param="tokens")
        texts = [self.hall.tokenizer.decode(ids, skip_special=skip) for ids in each]
        text: str | list[str] = texts if many else texts[0]
        return {"prompt": text, "text": text}

    async def apply_template(self, _http: Request, value: Any) -> Any:
        asked = api_tokenize.parse_template_request(
            parse_body(api_tokenize.ApplyTemplateBody, value), self.hall.default_thinking
        )
        ids = await self.hall.render_prompt(asked, most=self.hall.max_tokenize_tokens)
        return {"prompt": self.hall.tokenizer.decode(ids), "tokens": list(ids)}

    async def tokenizer_info(self, _http: Request, _value: Any) -> Any:
        template = getattr(self.hall.renderer, "template", None)
        return api_tokenize.tokenizer_info(
            self.hall.tokenizer, template.source if template else None
        )
