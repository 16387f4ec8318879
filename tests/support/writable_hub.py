"""A local server on which huggingface_hub can create repositories, upload and list files.

It speaks the hub's HTTP API as the library uses it: creation, branches, `preupload`, git LFS's
batch API, commits as JSON lines, trees, paths and downloads. Large files are uploaded through LFS.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest

from tests.support.local_server import LocalServer, use_server

LARGE = 1000
"""Size in bytes from which a file is uploaded through LFS."""
REVISION = "b" * 40
FIRST = "f" * 40
"""The commit with which a repository begins, without files."""

Reply = tuple[int, Any]


class WritableHub(LocalServer):
    """Holds repositories in memory.

    Attributes:
        repositories: the files of each repository's main branch, by its id.
        branches: the files of the other branches, by the repository's id and the branch's name.
        served: what it has in place of a file that is uploaded, by branch and path.
        private: the ids of the private ones.
        commits: the message of each commit.
        token: what a client must send to write.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.branches: dict[tuple[str, str], dict[str, bytes]] = {}
        self.served: dict[tuple[str, str], bytes] = {}
        self.private: set[str] = set()
        self.commits: list[str] = []
        self.token = "hf_right"
        self._large: dict[str, bytes] = {}
        super().__init__(_handler_of(self))

    def get(self, path: str, is_recursive: bool) -> Reply:
        """Answer a GET or HEAD request."""
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            body = (self._files(found[1], found[2]) or {}).get(found[3])
            return (404, "EntryNotFound") if body is None else (200, body)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", path):
            return self._tree(self._files(found[1], found[2]), found[3] or "", is_recursive)
        if re.fullmatch(r"/api/models/([^/]+/[^/]+)/commits/main", path):
            return 200, [_listed(REVISION), _listed(FIRST)]
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path)
        if found and found[1] in self.repositories:
            return 200, {"id": found[1], "sha": REVISION, "siblings": []}
        return 404, "RepoNotFound"

    def post(self, path: str, body: bytes) -> Reply:
        """Answer a POST request with the right token."""
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return 200, {"objects": [self._upload(each) for each in json.loads(body)["objects"]]}
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/([^/]+)", path):
            return self._branch(found[1], found[2], json.loads(body).get("startingPoint"))
        pattern = r"/api/models/([^/]+/[^/]+)/(preupload|commit|paths-info)/([^/]+)"
        found = re.fullmatch(pattern, path)
        files = self._files(found[1], found[3]) if found else None
        if found is None or files is None:
            return 404, "RepoNotFound"
        if found[2] == "preupload":
            return 200, {"files": [_mode(file) for file in json.loads(body)["files"]]}
        if found[2] == "paths-info":
            paths = parse_qs(body.decode())["paths"]
            found_paths = [_entry(path, files[path]) for path in paths if path in files]
            folders = [path for path in paths if any(name.startswith(f"{path}/") for name in files)]
            return 200, [*found_paths, *map(_folder, folders)]
        return self._commit(found[1], found[3], [json.loads(line) for line in body.splitlines()])

    def put(self, path: str, body: bytes) -> Reply:
        """Answer a PUT request: the content of a large file."""
        self._large[path.rsplit("/", 1)[1]] = body
        return 200, {}

    def _files(self, name: str, revision: str) -> dict[str, bytes] | None:
        if revision in ("main", REVISION):
            return self.repositories.get(name)
        return self.branches.get((name, revision))

    def _branch(self, name: str, branch: str, start: str | None) -> Reply:
        if (name, branch) in self.branches:
            return 409, "branch exists"
        self.branches[name, branch] = {} if start == FIRST else dict(self.repositories[name])
        return 200, {}

    def _create(self, wanted: dict[str, Any]) -> Reply:
        name = f"{wanted.get('organization', 'me')}/{wanted['name']}"
        url = {"url": f"{self.address}/{name}"}
        if name in self.repositories:
            return 409, url
        self.repositories[name] = {}
        if wanted.get("private") or wanted.get("visibility") == "private":
            self.private.add(name)
        return 200, url

    def _upload(self, wanted: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.address}/lfs/{wanted['oid']}"}
        return {"oid": wanted["oid"], "size": wanted["size"], "actions": {"upload": upload}}

    def _commit(self, name: str, branch: str, lines: list[dict[str, Any]]) -> Reply:
        changed = dict(self._files(name, branch) or {})
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                changed[value["path"]] = self._large[value["oid"]]
            elif line["key"] == "deletedFile":
                del changed[value["path"]]
        changed |= {path: body for (of, path), body in self.served.items() if of == branch}
        if branch == "main":
            self.repositories[name] = changed
        else:
            self.branches[name, branch] = changed
        url = f"{self.address}/{name}/commit/{REVISION}"
        return 200, {"success": True, "commitUrl": url, "commitOid": REVISION}

    def _tree(self, files: dict[str, bytes] | None, folder: str, is_recursive: bool) -> Reply:
        if files is None:
            return 404, "RepoNotFound"
        start = f"{folder}/" if folder else ""
        inside = {path: body for path, body in files.items() if path.startswith(start)}
        if folder and not inside:
            return 404, "EntryNotFound"
        found: dict[str, bytes | None] = {}
        for path, body in inside.items():
            parts = path[len(start) :].split("/")
            for depth in range(1, len(parts) if is_recursive else min(len(parts), 2)):
                found[start + "/".join(parts[:depth])] = None
            if is_recursive or len(parts) == 1:
                found[path] = body
        return 200, [_folder(p) if body is None else _entry(p, body) for p, body in found.items()]


@contextmanager
def writable_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[WritableHub]:
    """Run a hub and make huggingface_hub use it, logged in."""
    from huggingface_hub import HfFileSystem, constants

    with WritableHub() as hub:
        use_server(hub.address, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        HfFileSystem.clear_instance_cache()
        yield hub
        HfFileSystem.clear_instance_cache()


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    mode = "lfs" if file["size"] >= LARGE else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}


def _entry(path: str, body: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(body)}
    entry["oid"] = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()  # as git's
    if len(body) >= LARGE:
        sha256 = hashlib.sha256(body).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(body), "pointerSize": 130}
    return entry


def _listed(commit: str) -> dict[str, Any]:
    date = "2026-01-01T00:00:00.000Z"
    return {"id": commit, "title": "", "message": "", "authors": [], "date": date}


def _folder(path: str) -> dict[str, Any]:
    oid = hashlib.sha1(path.encode()).hexdigest()
    return {"type": "directory", "path": str(PurePosixPath(path)), "oid": oid, "size": 0}


def _handler_of(hub: WritableHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self._path == "/api/whoami-v2":
                self._reply(*((200, {"name": "me"}) if self._has_token else (401, "InvalidToken")))
                return
            is_recursive = "recursive=true" in self.path.lower()
            self._reply(*hub.get(self._path, is_recursive))

        do_HEAD = do_GET

        def do_POST(self) -> None:
            body = self._body()
            self._reply(*(hub.post(self._path, body) if self._has_token else (401, "InvalidToken")))

        def do_PUT(self) -> None:
            self._reply(*hub.put(self._path, self._body()))

        @property
        def _has_token(self) -> bool:
            return self.headers.get("Authorization") == f"Bearer {hub.token}"

        @property
        def _path(self) -> str:
            return unquote(self.path.split("?")[0])

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _reply(self, status: int, content: Any) -> None:
            """Send bytes, JSON, or the code of an error."""
            answer = {"error": content} if isinstance(content, str) else content
            body = content if isinstance(content, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            if isinstance(content, str):
                self.send_header("X-Error-Code", content)
            self.send_header("X-Repo-Commit", REVISION)
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Do not log requests."""

    return Handler
