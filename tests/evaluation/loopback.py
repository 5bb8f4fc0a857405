"""A server on loopback that speaks just enough of the OpenAI API to be asked, and misbehaves on command."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Loopback(ThreadingHTTPServer):
    """`misbehave` is consumed one word per request: an HTTP status, or "drop" to close the connection unanswered.

    The answer to every prompt is its last token, as text, unless `answer` says otherwise.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.misbehave: list[Any] = []
        self.always: int | None = None
        self.bodies: list[dict[str, Any]] = []
        self.answer: Callable[[dict[str, Any]], dict[str, Any]] = _answer
        self.models: list[dict[str, Any]] = [{"id": "m", "owned_by": "vllm", "max_model_len": 64}]
        self.lock = threading.Lock()
        self.in_flight = self.most_in_flight = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Loopback
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._reply(200, {"data": self.server.models})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
            word = server.misbehave.pop(0) if server.misbehave else server.always
            if word is None:
                server.bodies.append(body)
        try:
            if word == "drop":
                self.close_connection = True
                self.connection.close()
            elif word is not None:
                self._reply(word, {"error": "as told"}, {"Retry-After": "0"})
            else:
                threading.Event().wait(0.02)
                self._reply(200, server.answer(body))
        finally:
            with server.lock:
                server.in_flight -= 1

    def _reply(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def _answer(body: dict[str, Any]) -> dict[str, Any]:
    usage = {"completion_tokens": 3}
    if "messages" in body:
        message = {"content": f"Answer: {body['messages'][-1]['content']}"}
        return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
    return {"choices": [{"text": f"Answer: {body['prompt'][-1]}", "finish_reason": "stop"}], "usage": usage}


@contextmanager
def loopback() -> Iterator[Loopback]:
    server = Loopback()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
