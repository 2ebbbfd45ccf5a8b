"""Detection of cross-site requests and DNS rebinding.

A server without an API key must not be usable by an arbitrary page that a user opens. There are two
attacks: a page sends cross-site requests (`is_cross_site`), or its host name is made to resolve to
this machine, so that the browser treats the server as same-site (DNS rebinding). Such requests
carry that name in their Host header (`is_allowed_host`).
"""

from collections.abc import Collection, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit


def is_allowed_host(host: str | None, own: Collection[str] = ()) -> bool:
    """Whether a Host header is localhost, an IP address or one of our `own` names. Any other name
    may be rebound to this machine by its owner; an IP address cannot be.

    >>> [is_allowed_host(host) for host in ("127.0.0.1:8001", "[::1]:9", "localhost", "a.b")]
    [True, True, True, False]
    >>> is_allowed_host("box.lan:80", ["Box.lan"]), is_allowed_host("[")
    (True, False)
    """
    try:
        name = urlsplit(f"//{host or ''}").hostname or ""
        if name in {"localhost", *(each.lower() for each in own)}:
            return True
        ip_address(name)
    except ValueError:
        return False
    return True


def is_cross_site(headers: Mapping[str, str]) -> bool:
    """Whether a browser sent this request for a page of another site. Clients other than browsers
    send neither header.

    >>> is_cross_site({"host": "a:1", "origin": "http://a:1"}), is_cross_site({"host": "a:1"})
    (False, False)
    >>> is_cross_site({"host": "a:1", "origin": "http://["}), is_cross_site({"origin": "null"})
    (True, True)
    >>> is_cross_site({"host": "a:1", "sec-fetch-site": "cross-site"})
    True
    """
    # Images and links send no Origin header, but all current browsers send Sec-Fetch-Site.
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    origin = headers.get("origin")
    if origin is None:
        return False
    try:
        site = urlsplit(origin).netloc
    except ValueError:
        return True
    return not site or site.lower() != headers.get("host", "").lower()
