"""A Hugging Face Hub of local folders, for tests: the routes that `datasets` and `transformers` read, and no others."""

import hashlib
import json
import re
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "b" * 40
REPO = r"(?P<repo>[^/]+(?:/[^/]+)?)"
RESOLVE = re.compile(rf"/(?P<kind>datasets/)?{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
INFO = re.compile(rf"/api/(?P<kind>datasets|models)/{REPO}(?:/revision/(?P<revision>[^/]+))?")
LISTING = re.compile(
    rf"/api/(?P<kind>datasets|models)/{REPO}/(?P<what>tree|paths-info)/(?P<revision>[^/]+)(?:/(?P<path>.+))?"
)


class Request(NamedTuple):
    """One request as the server saw and answered it; `sent` counts bytes of the body."""

    method: str
    path: str
    range: str | None
    status: int
    sent: int


class Hub(ThreadingHTTPServer):
    """Serves `repos`, {("datasets" | "models", "owner/name"): folder}, and keeps every request in `requests`.

    `moved` maps old repository names to those in `repos`; as on the Hub, such a request is redirected. While
    `is_in_trouble`, no file is served, but 503.
    """

    daemon_threads = True

    def __init__(self, repos, moved=None):
        self.repos, self.moved, self.requests, self.is_in_trouble = repos, moved or {}, [], False
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open, as the Hub's do: a forked data worker inherits some

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.route()

    do_HEAD = do_GET

    def do_POST(self):
        self.route(parse_qs(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()))

    def route(self, form=None):
        path = unquote(urlsplit(self.path).path)
        if path == "/":
            return self.reply(b"hub", headers={"Content-Type": "text/html"})
        if match := RESOLVE.fullmatch(path):
            found, answer = match.groupdict(), self.resolve
        elif match := LISTING.fullmatch(path):
            found, answer = match.groupdict(), self.paths_info if match["what"] == "paths-info" else self.tree
        elif match := INFO.fullmatch(path):
            found, answer = match.groupdict(), self.info
        else:
            return self.refuse("EntryNotFound")
        repo, kind = found["repo"], (found["kind"] or "models").rstrip("/")
        if repo in self.server.moved:
            new = self.path.replace(repo, self.server.moved[repo], 1)
            return self.reply(b"", 307, {"Location": new})
        folder = self.server.repos.get((kind, repo))
        if folder is None:
            return self.refuse("RepoNotFound")
        if found.get("revision") not in (None, "main", COMMIT):
            return self.refuse("RevisionNotFound")
        return answer(folder, found.get("path") or "", form)

    def resolve(self, folder, path, _):
        if self.server.is_in_trouble:
            return self.reply(b"", 503)
        if not (folder / path).is_file():
            return self.refuse("EntryNotFound")
        content = (folder / path).read_bytes()
        headers = {"ETag": f'"{etag(folder / path)}"', "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            return self.reply(content, headers=headers)
        first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
        if first > last:
            return self.reply(b"", 416, headers | {"Content-Range": f"bytes */{len(content)}"})
        headers |= {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
        return self.reply(content[first : last + 1], 206, headers)

    def info(self, folder, *_):
        siblings = [{"rfilename": path.relative_to(folder).as_posix()} for path in folder.rglob("*") if path.is_file()]
        self.reply_json({"id": folder.name, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings})

    def tree(self, folder, path, _):
        if not (folder / path).is_dir():
            return self.refuse("EntryNotFound")
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", [""])[0].lower() in ("true", "1")
        entries = sorted((folder / path).rglob("*") if recursive else (folder / path).iterdir())
        return self.reply_json([describe(folder, entry) for entry in entries])

    def paths_info(self, folder, _, form):
        entries = [folder / path for path in form["paths"]]
        self.reply_json([describe(folder, entry) for entry in entries if entry.exists()])

    def reply_json(self, value):
        self.reply(json.dumps(value).encode(), headers={"Content-Type": "application/json"})

    def refuse(self, code):
        self.reply(b"{}", 404, {"X-Error-Code": code, "X-Error-Message": code, "Content-Type": "application/json"})

    def reply(self, body, status=200, headers=None):
        sent = 0 if self.command == "HEAD" else len(body)
        self.server.requests.append(Request(self.command, unquote(self.path), self.headers.get("Range"), status, sent))
        self.send_response(status)
        for key, value in {"X-Repo-Commit": COMMIT, **(headers or {}), "Content-Length": len(body)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if sent:
            self.wfile.write(body)


def etag(path):
    return hashlib.sha1(path.read_bytes()).hexdigest()


def describe(folder, path):
    """One entry of a tree, in the Hub's JSON."""
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0}
    return {"type": "file", "path": name, "oid": etag(path), "size": path.stat().st_size}


@contextmanager
def hanging_up():
    """(url, connections): a server that accepts every connection and closes it at once; `connections` grows by each."""
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept():
            while True:
                try:
                    connection, address = listener.accept()
                except OSError:  # closed: the test is over
                    return
                connections.append(address)
                connection.close()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", connections
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
