from hypothesis import given
from hypothesis import strategies as st

from paddock.data.rng import derive_seed, permute_index, uniform_at


@given(st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_an_order_is_a_permutation(count, stream):
    assert sorted(permute_index(i, count, stream) for i in range(count)) == list(range(count))


def test_all_permutations_of_four_are_equally_likely():
    orders = {}
    for epoch in range(4800):
        order = tuple(permute_index(i, 4, derive_seed("epoch", epoch)) for i in range(4))
        orders[order] = orders.get(order, 0) + 1
    assert len(orders) == 24
    assert all(120 < count < 290 for count in orders.values())  # 200 expected, six deviations


def test_numbers_are_uniform_and_differ_by_stream():
    numbers = [uniform_at(derive_seed("a"), n) for n in range(10_000)]
    assert all(abs(sum(low <= x < low + 0.1 for x in numbers) - 1000) < 180
               for low in (0.0, 0.3, 0.6, 0.9))  # fmt: skip
    assert uniform_at(derive_seed("a"), 7) != uniform_at(derive_seed("b"), 7)


def test_numbers_are_stable():
    assert derive_seed("a", 1) == 90929097926411725
    assert permute_index(3, 1000, 5) == 965
    assert uniform_at(9, 2) == 0.2653224405991833
