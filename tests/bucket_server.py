"""A small server of Google Cloud Storage's JSON API: it keeps objects in memory, with generations and rights.

It answers what the clients of a run ask (gcsfs, google-cloud-storage and TensorStore): reading of ranges, listing by
prefix and delimiter, uploads at once, in two parts and resumable, deleting, moving, copying, and the preconditions on
generations.
"""

import base64
import collections
import datetime
import email
import functools
import hashlib
import http.server
import itertools
import json
import re
import sys
import threading
import time
import urllib.parse

RIGHTS = frozenset(
  {
    "storage.buckets.get",
    "storage.objects.create",
    "storage.objects.delete",
    "storage.objects.get",
    "storage.objects.list",
  }
)

Stored = collections.namedtuple("Stored", "data generation updated")  # bytes, a number, seconds since 1970


class Failure(Exception):
  """An answer that is an error."""

  def __init__(self, status, message):
    super().__init__(message)
    self.status = status


class Bucket:
  """A bucket and what its clients may do.

  Attributes:
    name: its name.
    objects: its objects by name, as `Stored`.
    rights: the rights of the clients, of `RIGHTS`.
    watch: a function that is called with the method and the object's name, "" for the bucket, before a request is
      answered; it may raise `Failure`.
  """

  def __init__(self, name):
    self.name = name
    self.objects = {}
    self.rights = set(RIGHTS)
    self.watch = lambda method, name: None

  def path(self, name):
    """The path of an object or folder, for a client."""
    return f"gs://{self.name}/{name}"

  def names(self, prefix=""):
    """The sorted names of the objects that begin with `prefix`."""
    return sorted(name for name in self.objects if name.startswith(prefix))

  def contents(self, prefix=""):
    """The bytes of the objects that begin with `prefix`, by name."""
    return {name: self.objects[name].data for name in self.names(prefix)}

  def need(self, right):
    if right not in self.rights:
      raise Failure(403, f"the caller does not have {right} access to the Google Cloud Storage bucket.")

  def get(self, name, query):
    found = self.objects.get(name)
    if found is None or query.get("generation", str(found.generation)) != str(found.generation):
      raise Failure(404, f"No such object: {self.name}/{name}")
    return found

  def check_generation(self, name, query):
    """Checks the preconditions; an object that is not there has generation 0."""
    found = self.objects.get(name)
    generation = found.generation if found else 0
    if "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != generation:
      raise Failure(412, "At least one of the pre-conditions you specified did not hold.")
    if "ifGenerationNotMatch" in query and int(query["ifGenerationNotMatch"]) == generation:
      raise Failure(304, "")

  def put(self, name, data, query):
    self.need("storage.objects.create")
    self.check_generation(name, query)
    if name in self.objects:
      self.need("storage.objects.delete")
    self.objects[name] = Stored(bytes(data), next(_GENERATIONS), time.time())
    return self.resource(name)

  def resource(self, name):
    found = self.objects[name]
    written = datetime.datetime.fromtimestamp(found.updated, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {
      "kind": "storage#object",
      "id": f"{self.name}/{name}/{found.generation}",
      "bucket": self.name,
      "name": name,
      "generation": str(found.generation),
      "metageneration": "1",
      "contentType": "application/octet-stream",
      "storageClass": "STANDARD",
      "size": str(len(found.data)),
      "timeCreated": written,
      "updated": written,
      "md5Hash": base64.b64encode(hashlib.md5(found.data).digest()).decode(),
      "etag": str(found.generation),
    }

  def list(self, query):
    self.need("storage.objects.list")
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    entries = {}  # names in order, and whether each stands for those below it
    for name in self.names(prefix):
      if query.get("startOffset", "") <= name < query.get("endOffset", "\U0010ffff"):
        head, below, _ = name[len(prefix) :].partition(delimiter or "\0")
        entries[prefix + head + below] = bool(below)
    waiting = [name for name in entries if name > query.get("pageToken", "")]
    page = waiting[: int(query.get("maxResults", 1000))]
    answer = {
      "kind": "storage#objects",
      "items": [self.resource(name) for name in page if not entries[name]],
      "prefixes": [name for name in page if entries[name]],
    }
    return answer | ({"nextPageToken": page[-1]} if len(page) < len(waiting) else {})


_GENERATIONS = itertools.count(1_700_000_000_000_000)


class BucketServer:
  """A running server.

  Attributes:
    url: its address.
    buckets: its buckets by name.
    environment: the environment variables that point the clients here.
  """

  def __init__(self):
    self.buckets = {}
    self.lock = threading.Lock()
    self.sessions = {}  # of resumable uploads
    self._server = _Server(("127.0.0.1", 0), _Handler)
    self._server.store = self
    self.url = f"http://127.0.0.1:{self._server.server_port}"
    self.environment = {
      "STORAGE_EMULATOR_HOST": self.url,  # gcsfs and google-cloud-storage
      "TENSORSTORE_GCS_HTTP_URL": self.url,
      "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any",  # TensorStore looks no further for credentials
      "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # would ask for the layout of buckets over gRPC
    }
    threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

  def make_bucket(self):
    """Makes a bucket whose name no other has had, since clients remember buckets."""
    bucket = Bucket(f"bucket-{len(self.buckets)}")
    self.buckets[bucket.name] = bucket
    return bucket

  def find(self, name):
    if name not in self.buckets:
      raise Failure(404, "The specified bucket does not exist.")
    return self.buckets[name]


@functools.cache
def running_server():
  """The server of this process: the only one, since TensorStore asks for the address once."""
  return BucketServer()


class _Server(http.server.ThreadingHTTPServer):
  daemon_threads = True

  def handle_error(self, request, client_address):
    if not isinstance(sys.exception(), ConnectionError):  # clients may leave
      super().handle_error(request, client_address)


_BUCKET = re.compile(r"/storage/v1/b/([^/]+)")
_LIST = re.compile(r"/storage/v1/b/([^/]+)/o")
_OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)")
_MOVE = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)/moveTo/o/([^/]+)")
_COPY = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)/(?:rewriteTo|copyTo)/b/([^/]+)/o/([^/]+)")
_UPLOAD = re.compile(r"/(?:resumable/)?upload/storage/v1/b/([^/]+)/o")


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  wbufsize = -1  # one packet for an answer
  disable_nagle_algorithm = True

  def log_message(self, *arguments):
    pass

  def _answer(self):
    store = self.server.store
    url = urllib.parse.urlsplit(self.path)
    query = {name: values[-1] for name, values in urllib.parse.parse_qs(url.query).items()}
    body = self._body()
    try:
      with store.lock:
        for pattern, methods in self._routes().items():
          match = pattern.fullmatch(url.path)
          if match and self.command in methods:
            names = [urllib.parse.unquote(part) for part in match.groups()]
            bucket = store.find(names[0])
            bucket.watch(self.command, names[1] if len(names) > 1 else "")
            return self._reply(*methods[self.command](query, body, bucket, *names[1:]))
        raise Failure(501, f"{self.command} {self.path} is not served here")
    except Failure as failure:
      text = json.dumps({"error": {"code": failure.status, "message": str(failure)}}).encode()
      return self._reply(failure.status, b"" if failure.status == 304 else text)

  do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _answer

  def _routes(self):
    return {
      _BUCKET: {"GET": self._get_bucket},
      _LIST: {"GET": self._list},
      _OBJECT: {"GET": self._get, "DELETE": self._delete},
      _MOVE: {"POST": self._move},
      _COPY: {"POST": self._copy},
      _UPLOAD: {"POST": self._upload, "PUT": self._upload_chunk},
    }

  def _body(self):
    if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
      return self.rfile.read(int(self.headers.get("Content-Length", 0)))
    parts = []
    while size := int(self.rfile.readline().split(b";")[0], 16):
      parts.append(self.rfile.read(size))
      self.rfile.readline()
    self.rfile.readline()
    return b"".join(parts)

  def _reply(self, status, content=b"", headers=()):
    if not isinstance(content, bytes):
      content = json.dumps(content).encode()
    self.send_response(status)
    for name, value in headers:
      self.send_header(name, value)
    self.send_header("Content-Length", str(len(content)))
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(content)
    self.wfile.flush()

  def _get_bucket(self, query, body, bucket):
    bucket.need("storage.buckets.get")
    return 200, {"kind": "storage#bucket", "id": bucket.name, "name": bucket.name, "location": "US"}

  def _list(self, query, body, bucket):
    return 200, bucket.list(query)

  def _get(self, query, body, bucket, name):
    bucket.need("storage.objects.get")
    found = bucket.get(name, query)
    bucket.check_generation(name, query)
    if query.get("alt") != "media":
      return 200, bucket.resource(name)
    size = len(found.data)
    headers = [("X-Goog-Generation", str(found.generation)), ("X-Goog-Stored-Content-Length", str(size))]
    span = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
    if span is None:
      return 200, found.data, headers
    start, end = (int(text) if text else None for text in span.groups())
    start, end = (max(size - end, 0), size) if start is None else (start, size if end is None else min(end + 1, size))
    if start >= size:
      raise Failure(416, "the requested range cannot be satisfied")
    return 206, found.data[start:end], [*headers, ("Content-Range", f"bytes {start}-{end - 1}/{size}")]

  def _delete(self, query, body, bucket, name):
    bucket.need("storage.objects.delete")
    bucket.get(name, query)
    bucket.check_generation(name, query)
    del bucket.objects[name]
    return (204,)

  def _copy(self, query, body, bucket, name, to_bucket, to_name):
    bucket.need("storage.objects.get")
    resource = self.server.store.find(to_bucket).put(to_name, bucket.get(name, {}).data, {})
    size = resource["size"]
    copied = {"kind": "storage#rewriteResponse", "done": True, "objectSize": size, "totalBytesRewritten": size}
    return 200, copied | {"resource": resource}

  def _move(self, query, body, bucket, name, to_name):
    self._copy({}, b"", bucket, name, bucket.name, to_name)
    self._delete({}, b"", bucket, name)
    return 200, bucket.resource(to_name)

  def _upload(self, query, body, bucket):
    if "upload_id" in query:
      return self._upload_chunk(query, body, bucket)
    kind, described = query["uploadType"], {}
    if kind == "multipart":
      described, body = _split_multipart(self.headers["Content-Type"], body)
    elif kind == "resumable" and body:
      described = json.loads(body)
    name = query.get("name") or described["name"]
    bucket.watch("UPLOAD", name)
    if kind != "resumable":
      return 200, bucket.put(name, body, query)
    bucket.need("storage.objects.create")
    sessions = self.server.store.sessions
    key = str(len(sessions))
    sessions[key] = (name, {k: v for k, v in query.items() if k.startswith("if")}, bytearray())
    return 200, b"", [("Location", f"{self.server.store.url}{urllib.parse.urlsplit(self.path).path}?upload_id={key}")]

  def _upload_chunk(self, query, body, bucket):
    name, conditions, received = self.server.store.sessions[query["upload_id"]]
    received += body
    total = self.headers.get("Content-Range", "/*").rpartition("/")[2]
    if total != "*" and len(received) == int(total):
      return 200, bucket.put(name, received, conditions)
    return 308, b"", [("Range", f"bytes=0-{len(received) - 1}")] if received else []


def _split_multipart(content_type, body):
  """The JSON of the first part, and the bytes of the second one, which `email` would take for text."""
  boundary = b"--" + email.message_from_string(f"Content-Type: {content_type}\n\n").get_boundary().encode()
  _, described, content, _ = body.split(boundary, 3)
  described = re.split(rb"\r?\n\r?\n", described, maxsplit=1)[1]
  head = re.match(rb".*?\r?\n\r?\n", content.lstrip(b"\r\n"), re.DOTALL).end()
  content = content.lstrip(b"\r\n")[head:]
  return json.loads(described), re.sub(rb"\r?\n\Z", b"", content)
