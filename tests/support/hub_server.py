"""A Hub in a thread: the endpoints that huggingface_hub's client pushes to and loads from.

    with HubServer() as server:
        server.fail("POST", "/commit/", 503, times=2)
        HfApi(endpoint=server.endpoint, token=WRITE).upload_folder(...)
        server.files("org/name")  # {path: bytes} of the last commit

It keeps what it was sent (commits, LFS objects) and a list of all requests. Xet is not spoken.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from huggingface_hub.utils import validate_repo_id

WRITE, READ = "hf_write", "hf_read"  # the two tokens that exist


@dataclass(frozen=True)
class Blob:
    """A file's content; lfs: kept as an LFS object."""

    content: bytes
    lfs: bool

    @property
    def oid(self):
        if self.lfs:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass(frozen=True)
class Commit:
    oid: str
    message: str
    files: dict[str, Blob]


@dataclass
class Repo:
    private: bool
    branches: dict[str, list[Commit]] = field(default_factory=dict)


@dataclass
class Fault:
    method: str
    path: str
    how: int | str
    times: int


class Refused(Exception):
    """An answer that is an error, with the headers that the client reads."""

    def __init__(self, status, message, code=None, **more):
        self.status, self.message, self.code, self.more = status, message, code, more


class HubServer(ThreadingHTTPServer):
    """lfs: whether weights go through LFS. chunk_size: LFS objects in parts of so many bytes."""

    daemon_threads = True

    def __init__(self, lfs=True, chunk_size=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.lfs, self.chunk_size = lfs, chunk_size
        self.repos, self.objects, self.parts = {}, {}, {}
        self.requests, self.faults, self.lock = [], [], threading.RLock()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()

    def fail(self, method, path, how, times=1):
        """The next requests whose path has `path` in it fail.

        how: an HTTP status (a page of a proxy, not JSON); 'cut': the connection ends in the middle
        of the request's body; 'lost': the request is carried out, but the answer never comes.
        """
        self.faults.append(Fault(method, path, how, times))

    def fault(self, method, path):
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.method == method and fault.path in path:
                    fault.times -= 1
                    return fault.how

    def count(self, method, path=""):
        return sum(r.startswith(f"{method} ") and path in r for r in self.requests)

    def create(self, name, private=False, revision="main"):
        repo = self.repos[name] = Repo(private)
        self.commit(repo, revision, "initial commit", {".gitattributes": Blob(b"", False)})
        return repo

    def commit(self, repo, revision, message, files):
        with self.lock:
            number = sum(
                len(commits) for r in self.repos.values() for commits in r.branches.values()
            )
            oid = hashlib.sha1(b"%d" % number).hexdigest()
            repo.branches.setdefault(revision, []).append(Commit(oid, message, files))
            return oid

    def commits(self, name, revision="main"):
        """Messages, the first commit (the server's own) left out."""
        return [c.message for c in self.repos[name].branches[revision][1:]]

    def files(self, name, revision="main"):
        """{path: bytes} of the last commit."""
        files = self.repos[name].branches[revision][-1].files
        return {p: b.content for p, b in files.items() if p != ".gitattributes"}


class Handler(BaseHTTPRequestHandler):
    """Each method below answers one kind of request: (JSON or bytes, headers) or `Refused`."""

    protocol_version = "HTTP/1.1"
    ROUTES = []

    def log_message(self, *args):
        pass

    def answer(self):
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.server.requests.append(f"{self.command} {url.path}")
        fault = self.server.fault(self.command, url.path)
        if fault == "cut":
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
            self.close_connection = True
            return
        self.body = self.read_body()
        try:
            if isinstance(fault, int):
                raise Refused(fault, None)
            with self.server.lock:
                content, headers = self.find(url.path)
            status = 200
        except Refused as e:
            status, headers = e.status, {"X-Error-Code": e.code, "X-Error-Message": e.message}
            content = (
                {"error": e.message, **e.more} if e.message else b"<html>a proxy's page</html>"
            )
        if fault == "lost":
            self.close_connection = True
            return
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(content)}.items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def read_body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def find(self, path):
        for methods, pattern, route in self.ROUTES:
            if self.command in methods.split() and (found := re.fullmatch(pattern, path)):
                answer = route(self, *(unquote(group or "") for group in found.groups()))
                return answer if isinstance(answer, tuple) else (answer, {})
        raise Refused(404, f"no endpoint {self.command} {path}")

    # Who may do what

    def may_read(self, name):
        repo = self.server.repos.get(name)
        if repo is None or (repo.private and self.token() not in (READ, WRITE)):
            raise Refused(404, "Repository not found", "RepoNotFound")
        return repo

    def may_write(self, name=None):
        if self.token() not in (READ, WRITE):
            raise Refused(401, "Invalid username or password.")
        if self.token() != WRITE:
            raise Refused(403, "You need the write role to write here.")
        return self.may_read(name) if name else None

    def token(self):
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def revision(self, repo, revision):
        if revision in repo.branches:
            return repo.branches[revision][-1]
        for commit in (c for commits in repo.branches.values() for c in commits):
            if commit.oid == revision:
                return commit
        raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    # Pushing

    def create(self):
        self.may_write()
        wanted = json.loads(self.body)
        name = f"{wanted['organization']}/{wanted['name']}"
        url = f"{self.server.endpoint}/{name}"
        if name in self.server.repos:
            raise Refused(409, "You already created this model repo", url=url)
        self.server.create(name, private=wanted.get("visibility") == "private")
        return {"url": url, "name": name, "id": "1"}

    def branch(self, name, branch):
        repo = self.may_write(name)
        if branch in repo.branches:
            raise Refused(409, f"Reference already exists: {branch}")
        repo.branches[branch] = [repo.branches["main"][-1]]
        return {}

    def validate_card(self):
        found = re.match(r"---\n(.*?)\n---\n", json.loads(self.body)["content"], re.DOTALL)
        try:
            metadata = yaml.safe_load(found[1])
            bases = metadata.get("base_model", [])
            for base in [bases] if isinstance(bases, str) else bases:
                validate_repo_id(base)
        except Exception as error:
            errors = [{"message": str(error)}]
            raise Refused(400, "Invalid metadata", errors=errors, warnings=[]) from error
        return {"errors": [], "warnings": []}

    def preupload(self, name, revision):
        files = self.revision(self.may_write(name), revision).files

        def one(path, size):
            lfs = self.server.lfs and (path.endswith(".safetensors") or size > 10_000_000)
            oid = files[path].oid if path in files else None
            mode = "lfs" if lfs else "regular"
            return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

        return {"files": [one(f["path"], f["size"]) for f in json.loads(self.body)["files"]]}

    def batch(self, name):
        self.may_write(name)
        return {
            "objects": [self.action(o["oid"], o["size"]) for o in json.loads(self.body)["objects"]]
        }

    def action(self, oid, size):
        if oid in self.server.objects:  # no actions: it is there
            return {"oid": oid, "size": size}
        url = f"{self.server.endpoint}/lfs/{oid}"
        upload = {"href": url}
        if chunk := self.server.chunk_size:
            parts = {str(i + 1): f"{url}/part/{i + 1}" for i in range(-(-size // chunk))}
            upload = {"href": f"{url}/complete", "header": {"chunk_size": str(chunk), **parts}}
        return {
            "oid": oid,
            "size": size,
            "actions": {"upload": upload, "verify": {"href": f"{url}/verify"}},
        }

    def put(self, oid):
        self.server.objects[oid] = self.body
        return {}

    def put_part(self, oid, number):
        self.server.parts[oid, int(number)] = self.body
        return {}, {"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'}

    def complete(self, oid):
        numbers = [part["partNumber"] for part in json.loads(self.body)["parts"]]
        self.server.objects[oid] = b"".join(self.server.parts.pop((oid, n)) for n in numbers)
        return {}

    def verify(self, oid):
        self.may_write()
        if hashlib.sha256(self.server.objects[oid]).hexdigest() != oid:
            del self.server.objects[oid]
            raise Refused(400, "what came is not what was announced")
        return {}

    def commit(self, name, revision):
        repo = self.may_write(name)
        lines = [json.loads(line) for line in self.body.splitlines()]
        files = dict(self.revision(repo, revision).files)
        for key, value in ((line["key"], line["value"]) for line in lines):
            if key == "header":
                message = value["summary"]
            elif key == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
            elif key == "deletedFile":
                del files[value["path"]]
            elif value["oid"] in self.server.objects:
                files[value["path"]] = Blob(self.server.objects[value["oid"]], True)
            else:
                raise Refused(400, f"{value['path']}: there is no LFS object {value['oid']}")
        oid = self.server.commit(repo, revision, message, files)
        url = f"{self.server.endpoint}/{name}/commit/{oid}"
        return {"success": True, "commitUrl": url, "commitOid": oid}

    # Reading

    def info(self, name, revision):
        repo = self.may_read(name)
        commit = self.revision(repo, revision or "main")
        siblings = [{"rfilename": path} for path in commit.files]
        return {
            "id": name,
            "sha": commit.oid,
            "private": repo.private,
            "siblings": siblings,
            "tags": [],
        }

    def tree(self, name, revision, folder):
        files = self.revision(self.may_read(name), revision).files
        inside = {p: b for p, b in files.items() if p.startswith(folder and f"{folder}/")}
        if folder and not inside:
            raise Refused(404, f"no folder {folder}", "EntryNotFound")
        if self.query.get("recursive", ["false"])[0].lower() != "true":
            depth = folder.count("/") + 1 if folder else 0
            inside = {p: b for p, b in inside.items() if p.count("/") == depth}
        return [
            {"type": "file", "path": path, "size": len(blob.content), "oid": blob.oid}
            for path, blob in inside.items()
        ]

    def resolve(self, name, revision, path):
        commit = self.revision(self.may_read(name), revision)
        blob = commit.files.get(path)
        if blob is None:
            raise Refused(404, f"no file {path}", "EntryNotFound")
        return blob.content, {"X-Repo-Commit": commit.oid, "ETag": f'"{blob.oid}"'}

    NAME = r"([^/]+/[^/]+)"
    ROUTES += [
        ("POST", "/api/repos/create", create),
        ("POST", "/api/validate-yaml", validate_card),
        ("POST", rf"/api/models/{NAME}/branch/([^/]+)", branch),
        ("POST", rf"/api/models/{NAME}/preupload/([^/]+)", preupload),
        ("POST", rf"/api/models/{NAME}/commit/([^/]+)", commit),
        ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", batch),
        ("PUT", "/lfs/([^/]+)", put),
        ("PUT", "/lfs/([^/]+)/part/([0-9]+)", put_part),
        ("POST", "/lfs/([^/]+)/complete", complete),
        ("POST", "/lfs/([^/]+)/verify", verify),
        ("GET", rf"/api/models/{NAME}(?:/revision/([^/]+))?", info),
        ("GET", rf"/api/models/{NAME}/tree/([^/]+)(?:/(.+))?", tree),
        ("GET HEAD", rf"/{NAME}/resolve/([^/]+)/(.+)", resolve),
    ]
