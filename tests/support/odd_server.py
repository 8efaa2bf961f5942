"""A server of a few lines that samples, keeps a log of what it sampled, and answers as wrongly as a test sets it to.

It speaks vLLM's words (with token ids) or plain OpenAI's (texts alone); both with log-probabilities. A reply is made
right first and then handed to a misbehaviour, which may change anything of it.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.tiny import SPECIAL_TOKENS, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
WORDS = ("red", "green", "blue", "first", "the", "light", "blinks", "A.", "video", "seven", "12")
PLAIN_IDS = [token for token in range(len(TOKENIZER)) if token not in TOKENIZER.convert_tokens_to_ids(SPECIAL_TOKENS)]


@dataclass
class Reply:
    """What goes over the wire. ``value`` becomes the body unless ``body`` is set."""

    value: Any
    asked: dict[str, Any]
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    # Of the body, counted from its beginning: close the connection after so many bytes.
    cut: int | None = None
    # Send one byte of the body at a time, with so many seconds in between.
    drip_seconds: float = 0.0
    # Close without a word.
    silent: bool = False
    wait_seconds: float = 0.0

    def bytes(self) -> bytes:
        return json.dumps(self.value).encode() if self.body is None else self.body


Misbehave = Callable[[Reply], None]


class OddServer:
    """``next_reply(number)`` gives the misbehaviour of the number-th request, counted from 0, or None."""

    def __init__(self, exact: bool = True, seed: int = 0):
        self.exact, self.rng = exact, random.Random(seed)
        self.next_reply: Callable[[int], Misbehave | None] = lambda number: None
        self.models: Any = {"object": "list", "data": [{"id": "tiny", "owned_by": "vllm" if exact else "someone"}]}
        # What /openapi.json is; most servers have none.
        self.schema: Reply | None = None
        # Every response ever sampled: (question, token ids).
        self.log: set[tuple[str, tuple[int, ...]]] = set()
        self.sampled = self.requests = 0
        # Body and authorization of every request; how many times /models is answered with 503.
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.away_gets = 0
        self._lock = threading.Lock()
        self._port = 0
        self.start()
        self.url = f"http://127.0.0.1:{self._port}/v1"

    def start(self) -> None:
        """Listen, at the port of before."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if outer.schema is not None and self.path == "/openapi.json":
                    outer.send(self, outer.schema)
                    return
                if self.path != "/v1/models":
                    outer.send(self, outer.control(self.path, {}))
                    return
                status = 503 if outer.away_gets else 200
                outer.away_gets = max(0, outer.away_gets - 1)
                outer.send(self, Reply(outer.models if status == 200 else {}, {}, status))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not self.path.endswith("/chat/completions"):
                    outer.send(self, outer.control(self.path, body))
                    return
                outer.bodies.append(body)
                outer.keys.append(self.headers["Authorization"])
                outer.send(self, outer.reply(body))

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            # By default the sixth connection that waits is refused, which a busy machine sees at 16 requests at a time.
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # the client has left a connection that drips

        self._httpd = Quiet(("127.0.0.1", self._port), Handler)
        self._port = self._httpd.server_address[1]
        threading.Thread(target=self._httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        self._httpd.shutdown()
        self._httpd.server_close()

    def reply(self, body: dict[str, Any]) -> Reply:
        question = body["messages"][-1]["content"][-1]["text"]
        with self._lock:
            number, self.requests = self.requests, self.requests + 1
            choices = [self._choice(question, index) for index in range(body.get("n", 1))]
            reply = Reply({"id": f"c{number}", "object": "chat.completion", "choices": choices, "usage": {}}, body)
            change = self.next_reply(number)
        if change is not None:
            change(reply)
        return reply

    def control(self, path: str, body: dict[str, Any]) -> Reply:
        """The reply to what is no completion; there are no other endpoints."""
        return Reply({}, body, 404)

    def _choice(self, question: str, index: int) -> dict[str, Any]:
        """A right answer, which is logged."""
        if self.exact:
            ids = [*self.rng.choices(PLAIN_IDS, k=self.rng.randint(1, 9)), END]
            text = TOKENIZER.decode(ids, skip_special_tokens=False)
        else:
            text = " ".join(self.rng.choices(WORDS, k=self.rng.randint(1, 5)))
            ids = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], END]
        self.log.add((question, tuple(ids)))
        self.sampled += 1
        written = [
            {"token": TOKENIZER.decode([token], skip_special_tokens=False), "logprob": -5.9, "top_logprobs": []}
            for token in ids
        ]
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": text},
            "logprobs": {"content": written},
        }
        return choice | ({"token_ids": ids, "stop_reason": None} if self.exact else {})

    def send(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        if reply.wait_seconds:
            time.sleep(reply.wait_seconds)
        if reply.silent:
            handler.close_connection = True
            return
        data = reply.bytes()
        handler.send_response(reply.status)
        for name, value in (
            {"Content-Length": str(len(data)), "Content-Type": "application/json"} | reply.headers
        ).items():
            handler.send_header(name, value)
        handler.end_headers()
        if reply.cut is not None:
            handler.wfile.write(data[: reply.cut])
            handler.close_connection = True
        elif reply.drip_seconds:
            for position in range(len(data)):
                handler.wfile.write(data[position : position + 1])
                time.sleep(reply.drip_seconds)
        else:
            handler.wfile.write(data)
