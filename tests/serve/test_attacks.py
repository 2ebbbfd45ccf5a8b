"""A sample of what `make prove AREA=attack` sends: nothing fails, hangs, leaks or stops it."""

import pytest

from tests.serve import attacks


@pytest.mark.parametrize(
    ("kind", "every"),
    [("bodies", 6), ("addresses", 1), ("disconnecting", 1), ("wrong_types", 37)],
)
def test_a_server_survives(live, kind, every):
    chosen = list(getattr(attacks, kind)())[::every]
    found = {attack.name: attacks.complaint(live.url, attack) for attack in chosen}
    assert {name: why for name, why in found.items() if why} == {}
    hello = {"messages": attacks.USER, "max_tokens": 1}
    assert live.post(attacks.CHAT, hello).status_code == 200
