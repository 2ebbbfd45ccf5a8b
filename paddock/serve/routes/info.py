"""Chat page, health, metrics, model and server information."""

import asyncio
import time
from dataclasses import replace
from importlib.resources import files
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from paddock import __version__
from paddock.engine import Engine, EngineError, EngineStats
from paddock.engine import Request as EngineRequest
from paddock.http import JsonRouter
from paddock.records import ApiError, SamplingParams
from paddock.serve.chat_service import ChatService
from paddock.serve.metrics import MetricsCollector

GET = ("GET",)


class InfoRoutes:
    def __init__(self, service: ChatService) -> None:
        self.service = service
        settings = service.settings
        self.metrics_collector = MetricsCollector(
            prefix=settings.metrics_prefix, model=settings.served_model_name, clock=time.monotonic
        )
        self.page = (files("paddock.serve") / "page" / "chat.html").read_bytes()
        self.created = int(time.time())

    def register(self, router: JsonRouter) -> None:
        router.add_route("/", self.chat_page, methods=GET, media_type="text/html")
        for path in ("/health", "/ping"):
            router.add_route(path, self.health, methods=GET)
        router.add_route("/health_generate", self.health_generate, methods=GET)
        router.add_route("/metrics", self.metrics, methods=GET, media_type="text/plain")
        router.add_route("/v1/models", self.models, methods=GET)
        router.add_route("/v1/models/{model:path}", self.model, methods=GET)
        for path in ("/model_info", "/get_model_info"):
            router.add_route(path, self.model_info, methods=GET)
        for path in ("/server_info", "/get_server_info"):
            router.add_route(path, self.server_info, methods=GET)
        router.add_route("/get_weight_version", self.weight_version, methods=GET)
        for path in ("/v1/loads", "/get_load"):
            router.add_route(path, self.loads, methods=GET)

    async def chat_page(self, _http: Request, _value: Any) -> Response:
        # The page is self-contained; it may load nothing from other sites.
        policy = (
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
        )
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        return Response(self.page, media_type="text/html; charset=utf-8", headers=headers)

    async def health(self, _http: Request, _value: Any) -> Any:
        self._check_healthy()
        return {"status": "ok"}

    async def health_generate(self, _http: Request, _value: Any) -> Any:
        """Generate one token on every engine that is not paused."""
        self._check_healthy()
        all_stats = await self._stats()
        request = EngineRequest(
            token_ids=(0,),
            sampling_params=SamplingParams(max_new_tokens=1, temperature=0.0),
            priority=2**31,
        )
        try:
            async with asyncio.timeout(self.service.settings.health_timeout_s):
                for engine, stats in zip(self.service.replicas.engines, all_stats, strict=True):
                    if not stats.paused:
                        await engine.async_generate(_with_fresh_id(request))
        except (TimeoutError, EngineError) as error:
            why = str(error) or f"no token in {self.service.settings.health_timeout_s} s"
            raise ApiError(f"unhealthy: {why}", status=503) from None
        return {"status": "ok"}

    def _check_healthy(self) -> None:
        for rank, engine in enumerate(self.service.replicas.engines):
            if not engine.healthy:
                raise ApiError(f"the engine of replica {rank} has failed", status=503)

    async def _stats(self) -> list[EngineStats]:
        engines = self.service.replicas.engines
        return list(await asyncio.gather(*(asyncio.to_thread(Engine.stats, e) for e in engines)))

    async def metrics(self, _http: Request, _value: Any) -> Response:
        text = self.metrics_collector.render(
            await self._stats(), sessions=len(self.service.sessions)
        )
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, _http: Request, _value: Any) -> Any:
        return {
            "object": "list",
            "data": [self._model(n) for n in self.service.settings.served_model_names],
        }

    async def model(self, http: Request, _value: Any) -> Any:
        name = http.path_params["model"]
        self.service.check_model(name)
        return self._model(name)

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "paddock",
            "root": self.service.settings.model_path,
            "parent": None,
            "max_model_len": self.service.capacity.context_length,
        }

    async def model_info(self, _http: Request, _value: Any) -> Any:
        settings, engine = self.service.settings, self.service.replicas.engines[0]
        glm = hasattr(self.service.renderer, "version")
        return {
            "model_path": settings.model_path,
            "tokenizer_path": settings.model_path,
            "served_model_name": settings.served_model_name,
            "is_generation": True,
            "weight_version": self.service.labels.label_of(engine.version),
            "preferred_sampling_params": None,
            "reasoning_parser": "glm45" if glm else None,
            "tool_call_parser": "glm47" if glm else None,
            "model_type": engine.config.family,
            "architectures": None,
            "max_context_length": self.service.capacity.context_length,
            "vocab_size": self.service.vocab,
            "has_chat_template": self.service.renderer is not None,
        }

    async def server_info(self, _http: Request, _value: Any) -> Any:
        settings, replicas = self.service.settings, self.service.replicas
        capacity, engine = self.service.capacity, replicas.engines[0].settings
        states = [
            {
                "dp_rank": rank,
                "weight_version": self.service.labels.label_of(stats.version),
                "num_running_reqs": stats.running,
                "num_waiting_reqs": stats.waiting,
                "paused": stats.paused,
                "token_usage": stats.kv_cache_usage,
                "cache_hit_rate": stats.prefix_cache_hit_rate,
                "avg_spec_accept_length": stats.accept_length,
                "cache_bytes": stats.kv_cache_bytes,
            }
            for rank, stats in enumerate(await self._stats())
        ]
        return {
            "version": __version__,
            "model_path": settings.model_path,
            "served_model_name": settings.served_model_name,
            "tp_size": 1,
            "dp_size": len(replicas),
            "context_length": capacity.context_length,
            "max_total_num_tokens": capacity.tokens,
            "max_running_requests": engine.max_running_requests,
            "page_size": capacity.page_size,
            "speculative_num_steps": engine.num_speculative_tokens,
            "enable_return_routed_experts": engine.capture_routing,
            "internal_states": states,
        }

    async def weight_version(self, _http: Request, _value: Any) -> Any:
        version = self.service.replicas.engines[0].version
        return {"weight_version": self.service.labels.label_of(version)}

    async def loads(self, _http: Request, _value: Any) -> Any:
        return [
            {
                "dp_rank": rank,
                "num_reqs": stats.running + stats.waiting,
                "num_waiting_reqs": stats.waiting,
                "num_tokens": stats.running_tokens,
                "num_pending_tokens": stats.waiting_tokens,
            }
            for rank, stats in enumerate(await self._stats())
        ]


def _with_fresh_id(request: EngineRequest) -> EngineRequest:
    return replace(request, id=f"health-{uuid4().hex}")
