"""What every HTTP server of ours needs, whatever it serves.

origin.py  requests that a browser sends on behalf of other sites' pages
server.py  uvicorn with deadlines for connections that send or read nothing
"""

from paddock.http.origin import is_cross_site, names_this_machine

__all__ = ["is_cross_site", "names_this_machine"]
