"""Offline replacements of package installers, for tasks whose tests install pytest themselves.

A Python environment that already has the packages is mounted into the sandbox, and these scripts
are first in PATH: `uv` and `uvx` run commands in that environment, installers only print a message.
"""

OFFLINE_BIN = "/opt/paddock/bin"

_NO_DOWNLOAD = '#!/bin/sh\necho "$(basename "$0"): nothing is fetched here" >&2\nexit 0\n'

# Options of `uv run` and `uvx` that take a value; all others are dropped alone.
_UV = """#!/bin/sh
name=$(basename "$0")
case "$name $1" in
  "uv run") shift ;;
  "uv init"|"uv add"|"uv sync"|"uv venv"|"uv pip"|"uv lock"|"uv python"|"uv tool")
    if [ "$1" = venv ]; then mkdir -p .venv/bin; : > .venv/bin/activate; fi
    exit 0 ;;
  "uv --version"|"uv self"|"uv version") echo "uv 0.0.0"; exit 0 ;;
esac
while [ $# -gt 0 ]; do
  case "$1" in
    --with|-w|-p|--python|--from|--index-url|--extra-index-url|--project|--directory|--group|--extra)
      shift 2 ;;
    --) shift; break ;;
    -*) shift ;;
    *) break ;;
  esac
done
case "$1" in
  *.py) exec {python} "$@" ;;
  python|python3) shift; exec {python} "$@" ;;
  pytest|*/pytest) shift; exec {pytest} "$@" ;;
esac
exec "$@"
"""
_PYTHON = '#!/bin/sh\nexec {python} "$@"\n'
_PYTEST = '#!/bin/sh\nexec {pytest} "$@"\n'
_PIP = """#!/bin/sh
case "$1" in install|download|wheel|uninstall)
  echo "pip: nothing is fetched here" >&2; exit 0 ;; esac
exec {python} -m pip "$@"
"""


def offline_tool_scripts(python: str) -> dict[str, str]:
    """Scripts by name, for a Python environment with this interpreter."""
    # Without -P modules would be imported from the working directory, unlike with `pytest`.
    pytest = f"{python} -P -m pytest"
    installers = ("apt-get", "apt", "curl", "wget", "add-apt-repository")
    return {
        **dict.fromkeys(installers, _NO_DOWNLOAD),
        "uv": _UV.replace("{python}", python).replace("{pytest}", pytest),
        "uvx": _UV.replace("{python}", python).replace("{pytest}", pytest),
        "pip": _PIP.replace("{python}", python),
        "pip3": _PIP.replace("{python}", python),
        "python": _PYTHON.replace("{python}", python),
        "python3": _PYTHON.replace("{python}", python),
        "pytest": _PYTEST.replace("{pytest}", pytest),
    }
