"""The engine's HTTP doors: every dialect that clients, routers and trainers speak.

app.py       the application: every door, and the guard before them
doors/       one file a dialect
auth.py      who may come in
chat_service.py  conversations become prompts, prompts requests, requests answers
response_store.py  responses that the next one may go on from
metrics.py   numbers for Prometheus
page/        the chat page
load_balancer.py  several engines behind one door, and who answers which session
settings.py  how a server presents itself, and its keys
weight_updater.py  what the control routes need of whoever changes weights
"""

from paddock.serve.app import build_app
from paddock.serve.settings import ApiKeys, ServeSettings

__all__ = [
    "ApiKeys",
    "ServeSettings",
    "build_app",
]
