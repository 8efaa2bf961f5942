"""A server of chat answers that a test makes up, and a log of what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer:
    """Answers with what ``reply(prompt)`` returns: a verdict's text, or (status, bytes)."""

    def __init__(self) -> None:
        self.reply: Callable[[str], str | tuple[int, bytes]] = lambda prompt: "0.5"
        # The first name in its list of models.
        self.listed: Any = "listed"
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.in_flight = self.most_in_flight = 0
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, json.dumps({"data": [{"id": fake.listed}]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake._lock:
                    fake.in_flight += 1
                    fake.most_in_flight = max(fake.most_in_flight, fake.in_flight)
                    fake.bodies.append(body)
                    fake.keys.append(self.headers.get("Authorization"))
                answer = fake.reply(body["messages"][0]["content"])
                with fake._lock:
                    fake.in_flight -= 1
                if isinstance(answer, str):
                    answer = 200, json.dumps({"choices": [{"message": {"content": answer}}]}).encode()
                self._send(*answer)

            def _send(self, status: int, data: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
