"""Network modes of Harbor and validation of host lists."""

import re
from ipaddress import ip_address, ip_network
from typing import Literal

Mode = Literal["public", "no-network", "allowlist"]
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def validate_hosts(hosts: list[str]) -> list[str]:
    """Normalised host names, `*.example.com`, addresses and networks.

    >>> validate_hosts(["Example.com.", "*.a.org", "10.0.0.0/8", "::1"])
    ['example.com', '*.a.org', '10.0.0.0/8', '::1']
    >>> validate_hosts(["https://a.org"])
    Traceback (most recent call last):
    ValueError: must be a host name, address or network, got 'https://a.org'
    """
    return [_checked(host) for host in hosts]


def _checked(text: str) -> str:
    host = text.strip().lower().rstrip(".")
    invalid = ValueError(f"must be a host name, address or network, got {text!r}")
    try:
        if "/" in host:
            return ip_network(host, strict=True).compressed
        if "%" in host:
            raise invalid
        if ":" in host:
            return ip_address(host).compressed
    except ValueError:
        raise invalid from None
    name = host.removeprefix("*.")
    if name != host and _is_address(name):
        raise ValueError(f"a wildcard must precede a host name, not an address, got {text!r}")
    if not name or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise invalid
    return host


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def validate_network_mode(mode: Mode | None, hosts: list[str] | None) -> None:
    """Raises ValueError if hosts are listed for another mode than allowlist."""
    if mode != "allowlist" and (hosts if mode is not None else hosts is not None):
        raise ValueError("allowed_hosts needs network_mode = 'allowlist'")
