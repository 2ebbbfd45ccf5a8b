"""The engine's HTTP doors: every dialect that clients, routers and trainers speak.

app.py       the application: every door, and the guard before them
doors/       one file a dialect
guard.py     who may come in
hall.py      conversations become prompts, prompts requests, requests answers
kept.py      responses that the next one may go on from
metrics.py   numbers for Prometheus
page/        the chat page
replicas.py  several engines behind one door, and who answers which session
settings.py  how a server presents itself, and its keys
weights.py   what the control routes need of whoever changes weights
"""

from paddock.serve.app import build_app
from paddock.serve.settings import Keys, ServeSettings

__all__ = ["Keys", "ServeSettings", "build_app"]
