"""Requests that a browser sends on behalf of other sites' pages.

A server without a key must not be usable by whatever page a person happens to open. Two ways lead
there: a page sends requests across sites (`is_cross_site`), or its own host name is made to resolve
to this machine, which the browser then takes for the page's own site (DNS rebinding): such requests
carry that name in their Host header (`names_this_machine`).
"""

from collections.abc import Collection, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit


def is_allowed_host(host: str | None, own: Collection[str] = ()) -> bool:
    """Whether a Host header is localhost, an IP address or one of our `own` names. Any other name
    may have been pointed here by its owner; an address cannot be.

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
    """Whether a browser sends this on behalf of a page of another site. Clients other than browsers
    send neither header.

    >>> is_cross_site({"host": "a:1", "origin": "http://a:1"}), is_cross_site({"host": "a:1"})
    (False, False)
    >>> is_cross_site({"host": "a:1", "origin": "http://["}), is_cross_site({"origin": "null"})
    (True, True)
    >>> is_cross_site({"host": "a:1", "sec-fetch-site": "cross-site"})
    True
    """
    # An image or a link to us sends no Origin, but every current browser says where it comes from.
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
