"""A small HTTP proxy before the real S3 that refuses, delays, or loses answers, as a test tells it to.

What passes goes to the real store unchanged (the `Host` that is signed too), and its answers come back unchanged:
botocore's retries, the conditional writes and the digests are the real ones.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Fault:
    """What happens to one request."""

    refuse: int | None = None  # answer with this status instead of passing it on
    delay: float = 0.0  # seconds before it is passed on
    lose_answer: bool = False  # pass it on, then cut the connection before the answer
    cut_request: bool = False  # pass on half of the body, then cut both connections


PASS = Fault()
CODES = {503: "SlowDown", 403: "AccessDenied", 507: "InsufficientStorage", 500: "InternalError"}
Rule = Callable[[str, str, int], Fault]  # (method, path, how many writes there were before) -> what happens


@dataclass
class Proxy:
    """A running proxy; set `rule` to choose faults."""

    address: str
    rule: Rule = lambda method, path, writes: PASS
    writes: int = 0  # PUT requests seen, retries too
    faults: int = 0  # injected so far
    lock: threading.Lock = field(default_factory=threading.Lock)

    def judge(self, method: str, path: str) -> Fault:
        with self.lock:
            fault = self.rule(method, path, self.writes)
            self.writes += method == "PUT"
            self.faults += fault != PASS
            return fault

    def obey(self, rule: Rule) -> None:
        """From now on this rule, with writes and faults counted anew."""
        with self.lock:
            self.rule, self.writes, self.faults = rule, 0, 0


@contextmanager
def proxy_before(endpoint: str) -> Iterator[Proxy]:
    """Run a proxy before the store at `endpoint`."""
    target = urlsplit(endpoint)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = proxy.judge(self.command, self.path)
            time.sleep(fault.delay)
            if fault.refuse is not None:
                code = CODES[fault.refuse]
                text = f"<Error><Code>{code}</Code><Message>Injected.</Message></Error>".encode()
                self.reply(fault.refuse, [("Content-Type", "application/xml")], text)
                return
            store = http.client.HTTPConnection(target.hostname or "", target.port or 80, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            if fault.cut_request:
                store.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in headers.items():
                    store.putheader(name, value)
                store.endheaders(body[: len(body) // 2])
                store.close()
                self.close_connection = True
                return
            store.request(self.command, self.path, body or None, headers)
            answer = store.getresponse()
            content = answer.read()
            store.close()
            if fault.lose_answer:
                self.close_connection = True
                return
            self.reply(answer.status, answer.getheaders(), content)

        def reply(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
            self.send_response_only(status)
            length = None
            for name, value in headers:
                if name.lower() == "content-length":
                    length = value  # a HEAD's answer names a length and has no body
                elif name.lower() not in {"transfer-encoding", "connection"}:
                    self.send_header(name, value)
            self.send_header(
                "Content-Length", length if self.command == "HEAD" and length else str(len(content))
            )
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = serve  # noqa: N815

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        proxy = Proxy(address=f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()
