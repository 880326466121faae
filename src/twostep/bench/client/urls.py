"""Where the API of a server is, by its URL."""

from urllib.parse import urlsplit

EXAMPLE = "http://127.0.0.1:8000"


def api_base(url: str) -> str | None:
    """With the API's version at its end: `/v1` unless the URL has one, as OpenVINO Model Server's `/v3`.

    None for what is no URL of a server, or has a user or a password in it.
    """
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc and parts.port != 0
    except ValueError:  # the port is none, or a bracket is open
        known = False
    if not known or parts.query or parts.fragment:
        return None
    path = parts.path.rstrip("/")
    version = path.rpartition("/")[2]
    is_versioned = version[:1] == "v" and version[1:].isdecimal()
    return f"{parts.scheme}://{parts.netloc}{path if is_versioned else f'{path}/v1'}"
