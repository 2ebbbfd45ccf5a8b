"""The model that tests/serve has schooled, for sessions with a real engine behind them."""

from tests.serve.conftest import folder

__all__ = ["folder"]
