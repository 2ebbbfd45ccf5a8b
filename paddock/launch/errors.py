"""Errors whose message tells the user what to change."""


class UserError(ValueError):
    """A request that cannot be carried out; the message says what to change."""
