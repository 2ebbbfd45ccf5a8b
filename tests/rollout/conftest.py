"""The memorized model of tests/serve, for sessions with a real engine."""

from tests.serve.conftest import folder

__all__ = ["folder"]
