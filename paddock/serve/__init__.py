"""HTTP server of the inference engine: OpenAI, Anthropic, SGLang and vLLM APIs.

app.py       FastAPI application: all routes behind the auth middleware
auth.py      authentication middleware: API keys, cross-site requests
chat_service.py  prompt rendering, request building and generation
generation.py  engine requests of one API request in flight
load_balancer.py  engine replicas with session affinity
metrics.py   Prometheus metrics
page/        the chat page
response_store.py  responses stored for previous_response_id
routes/      one file per API
settings.py  server settings and API keys
weight_updater.py  protocol of weight updaters
"""

from paddock.serve.app import build_app
from paddock.serve.settings import ApiKeys, ServeSettings

__all__ = [
    "ApiKeys",
    "ServeSettings",
    "build_app",
]
