"""A server with /schema, /reset and /step and nothing else, which keeps an episode by its id."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SCHEMA = {"type": "object", "properties": {"add": {"type": "integer"}}, "required": ["add"]}


class Counter(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    totals: dict[str, int] = {}  # noqa: RUF012  by episode

    def do_GET(self):
        self.reply(200, {"action": SCHEMA} if self.path == "/schema" else {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        episode = body["episode_id"]
        if self.path == "/reset":
            self.totals[episode] = body.get("seed", 0) % 10
            return self.reply(200, {"observation": {"text": f"at {self.totals[episode]}"}})
        add = body["action"]["add"]
        if add < 0:
            return self.reply(422, {"detail": "add must not be negative"})
        self.totals[episode] += add
        total = self.totals[episode]
        found = {"observation": {"text": f"at {total}"}, "reward": add / 10, "done": total >= 10}
        return self.reply(200 if add < 100 else 500, found)

    def reply(self, status, value):
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_):
        pass


class CounterServer(ThreadingHTTPServer):
    request_queue_size = 128  # of rollouts that connect at once


def counter_server():
    """A server on a free port, not started."""
    return CounterServer(("127.0.0.1", 0), Counter)
