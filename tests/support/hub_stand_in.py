"""A local server that answers huggingface_hub like the hub, for one dataset repository and one
model repository with the same files."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.local_server import LocalServer

DATASET, MODEL = "owner/data", "owner/model"


class HubStandIn(LocalServer):
    """Serves `files` as `revision`. `requests` lists the requested paths.

    Attributes:
        listed: the files that it says it has; by default those that it has.
        card: the metadata of the repository's card.
        stalls_from: of the file with this name, and of those after it in order of their names, it
            sends only the half, and then nothing.
        is_stalled: set once it has.
        error: the code that it answers requests for a repository with, such as "GatedRepo".
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.listed: dict[str, bytes] | None = None
        self.card: dict[str, Any] = {}
        self.error: str | None = None
        self.stalls_from: str | None = None
        self.is_stalled = threading.Event()
        self.revision = "a" * 40
        self.requests: list[str] = []
        super().__init__(self._handler())

    def downloads(self) -> list[str]:
        """Return the names of the files that were downloaded since the last call."""
        paths = [path for path in self.requests if path.startswith("GET") and "/resolve/" in path]
        self.requests.clear()
        return sorted(path.rsplit("/", 1)[1] for path in paths)

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Return status, body and headers for a path."""
        if self.error is not None:
            return 403, b"", {"X-Error-Code": self.error}
        names = self.files if self.listed is None else self.listed
        for kind, name in (("datasets", DATASET), ("models", MODEL)):
            if path.startswith(f"/api/{kind}/{name}/tree/"):
                entries = [{"type": "file", "path": name, **_entry(name)} for name in names]
                return 200, json.dumps(self._with_content(entries, "path")).encode(), {}
            if path.split("/revision/")[0] == f"/api/{kind}/{name}":
                siblings = [{"rfilename": name, **_entry(name)} for name in names]
                found = self._with_content(siblings, "rfilename")
                info: dict[str, Any] = {"id": name, "sha": self.revision, "siblings": found}
                info["cardData"] = self.card
                return 200, json.dumps(info).encode(), {}
        if path.startswith((f"/datasets/{DATASET}/resolve/", f"/{MODEL}/resolve/")):
            body = self.files.get(path.split("/resolve/")[1].split("/", 1)[1])
            if body is None:
                return 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.revision}
            etag = f'"{hashlib.sha256(body).hexdigest()}"'
            return 200, body, {"ETag": etag, "X-Repo-Commit": self.revision}
        return 404, b"", {"X-Error-Code": "RepoNotFound"}

    def _with_content(self, entries: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
        for entry in entries:
            body = (self.listed or self.files)[entry[key]]
            sha256 = hashlib.sha256(body).hexdigest()
            entry["size"] = len(body)
            entry["lfs"] = {"oid": sha256, "sha256": sha256, "size": len(body), "pointerSize": 130}
        return entries

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                hub.requests.append(f"{self.command} {path}")
                status, body, headers = hub.answer(path)
                wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
                if wanted and status == 200:
                    first, last = int(wanted[1]), len(body) - 1
                    headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
                    status, body = 206, body[first:]
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                stalls = hub.stalls_from and path.rsplit("/", 1)[1] >= hub.stalls_from
                if self.command == "GET" and "/resolve/" in path and stalls:
                    self.wfile.write(body[: len(body) // 2])
                    hub.is_stalled.set()
                    threading.Event().wait(60)  # longer than the client lives
                elif self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                """Do not log requests."""

        return Handler


def _entry(name: str) -> dict[str, Any]:
    number = hashlib.sha1(name.encode()).hexdigest()
    return {"oid": number, "blobId": number}
