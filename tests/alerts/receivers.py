"""Receivers of messages in this process: a web server and a mail server that keep what they get."""

import json
import socketserver
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

HOST = "127.0.0.1"


@contextmanager
def serving(server):
    """The server, answering in a thread."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def web_server(answers=()):
    """(address, requests): answers each POST with the next of `answers` (status, headers), then with 204."""
    requests, left = [], list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.path, self.headers["Host"], json.loads(body)))
            status, headers = left.pop(0) if left else (204, {})
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *given):
            pass

    with serving(HTTPServer((HOST, 0), Handler)) as server:
        yield f"http://{HOST}:{server.server_port}", requests


@contextmanager
def mail_server():
    """(host:port, mails): speaks enough SMTP to take mails."""
    mails: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            self.wfile.write(b"220 ready\r\n")
            while line := self.rfile.readline():
                command = line.split()[0].upper() if line.split() else b""
                if command == b"DATA":
                    self.wfile.write(b"354 go on\r\n")
                    lines = []
                    while (part := self.rfile.readline()) != b".\r\n":
                        lines.append(part.decode())
                    mails.append("".join(lines))
                if command == b"QUIT":
                    self.wfile.write(b"221 bye\r\n")
                    return
                self.wfile.write(b"250 fine\r\n")

    with serving(socketserver.TCPServer((HOST, 0), Handler)) as server:
        yield f"{HOST}:{server.server_address[1]}", mails
