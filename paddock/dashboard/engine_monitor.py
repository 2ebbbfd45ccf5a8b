"""Metrics of a live engine, polled from its Prometheus endpoint."""

from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic, time
from typing import Any

POLL_INTERVAL_S = 1.0  # at least, between two requests
MAX_POINTS = 900  # kept
TIMEOUT_S = 2.0


class EngineMonitor:
    """Polls `url`/metrics on request and keeps the newest MAX_POINTS samples."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url, self._key = url.rstrip("/"), key
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=MAX_POINTS)
        self._polled: float | None = None
        self._error = ""

    def poll(self, clock: Callable[[], float] = monotonic) -> Mapping[str, Any]:
        """All samples so far, with a new one if the last is older than POLL_INTERVAL_S."""
        now = clock()
        if self._polled is None or now - self._polled >= POLL_INTERVAL_S:
            self._polled = now
            self._request()
        return {"url": self.url, "rows": list(self._rows), "error": self._error}

    def _request(self) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            response = httpx.get(f"{self.url}/metrics", headers=headers, timeout=TIMEOUT_S)
            response.raise_for_status()
            self._rows.append({"time": time(), **parse_metrics(response.text)})
            self._error = ""
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            self._error = f"{self.url} cannot be reached: {error}"


def parse_metrics(text: str) -> dict[str, float]:
    """Gauges and counters of a Prometheus page, without their prefix, summed over replicas.

    Rates, lengths, usages and versions are averaged instead.

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
    averaged = ("usage", "rate", "length", "version")
    return {
        name: sum(values) / len(values) if name.endswith(averaged) else sum(values)
        for name, values in found.items()
    }
