"""An engine's own numbers: those a run wrote down, and those a running server shows."""

from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic, time
from typing import Any

POLL_INTERVAL_S = 1.0  # between two looks at a server
MAX_POINTS = 900  # looks
TIMEOUT_S = 2.0


class EngineMonitor:
    """Looks at a server's metrics when it is asked to, and remembers what it saw."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url, self._key = url.rstrip("/"), key
        self._seen: deque[Mapping[str, Any]] = deque(maxlen=MAX_POINTS)
        self._looked: float | None = None
        self._wrong = ""

    def poll(self, clock: Callable[[], float] = monotonic) -> Mapping[str, Any]:
        now = clock()
        if self._looked is None or now - self._looked >= POLL_INTERVAL_S:
            self._looked = now
            self._ask()
        return {"url": self.url, "rows": list(self._seen), "wrong": self._wrong}

    def _ask(self) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            answer = httpx.get(f"{self.url}/metrics", headers=headers, timeout=TIMEOUT_S)
            answer.raise_for_status()
            self._seen.append({"time": time(), **parse_metrics(answer.text)})
            self._wrong = ""
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            self._wrong = f"{self.url} does not answer: {error}"


def parse_metrics(text: str) -> dict[str, float]:
    """Gauges and counters of a page of metrics, summed over replicas, without their prefix. Shares
    and lengths are averaged: their sum means nothing.

    >>> parse_metrics('# TYPE a:token_usage gauge\\na:token_usage{r="0"} 0.5\\n'
    ...         'a:token_usage{r="1"} 0.3\\n# TYPE a:num_queue_reqs gauge\\na:num_queue_reqs 2\\n')
    {'token_usage': 0.4, 'num_queue_reqs': 2}
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(text):
        if family.type not in ("gauge", "counter"):
            continue
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            name = sample.name.rpartition(":")[2].removesuffix("_total")
            if position := sample.labels.get("position"):
                name = f"{name}.{position}"
            found.setdefault(name, []).append(sample.value)
    shares = ("usage", "rate", "length", "version")
    return {
        name: sum(values) / len(values) if name.endswith(shares) else sum(values)
        for name, values in found.items()
    }
