"""What every HTTP server of ours needs, whatever it serves.

cross_site.py  requests that a browser sends on behalf of other sites' pages
server.py  uvicorn with deadlines for connections that send or read nothing
"""

from paddock.http.cross_site import is_allowed_host, is_cross_site

__all__ = ["is_allowed_host", "is_cross_site"]
