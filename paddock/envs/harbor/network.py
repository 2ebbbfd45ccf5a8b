"""Who a task may talk to: the three modes of Harbor, and what a list of hosts may say."""

import re
from ipaddress import ip_address, ip_network
from typing import Literal

Mode = Literal["public", "no-network", "allowlist"]
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def validate_hosts(hosts: list[str]) -> list[str]:
    """Host names, `*.example.com`, addresses and networks, in one spelling.

    >>> validate_hosts(["Example.com.", "*.a.org", "10.0.0.0/8", "::1"])
    ['example.com', '*.a.org', '10.0.0.0/8', '::1']
    >>> validate_hosts(["https://a.org"])
    Traceback (most recent call last):
    ValueError: 'https://a.org' is no host name, address or network
    """
    return [_checked(host) for host in hosts]


def _checked(said: str) -> str:
    host = said.strip().lower().rstrip(".")
    wrong = ValueError(f"{said!r} is no host name, address or network")
    try:
        if "/" in host:
            return ip_network(host, strict=True).compressed
        if "%" in host:
            raise wrong
        if ":" in host:
            return ip_address(host).compressed
    except ValueError:
        raise wrong from None
    name = host.removeprefix("*.")
    if name != host and _is_address(name):
        raise ValueError(f"{said!r}: a wildcard stands before a name, not before an address")
    if not name or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise wrong
    return host


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def validate_network_mode(mode: Mode | None, hosts: list[str] | None) -> None:
    """Hosts are listed for an allowlist only."""
    if mode != "allowlist" and (hosts if mode is not None else hosts is not None):
        raise ValueError("allowed_hosts needs network_mode = 'allowlist'")
