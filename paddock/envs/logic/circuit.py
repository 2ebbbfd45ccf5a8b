"""Logic circuits: what are the values of the last gates?"""

from random import Random

from paddock.envs.datasets import QAExample

_GATES = {
    "AND": lambda a, b: a and b,
    "OR": lambda a, b: a or b,
    "XOR": lambda a, b: a != b,
    "NAND": lambda a, b: not (a and b),
    "NOR": lambda a, b: not (a or b),
}


def generate_circuit(rng: Random, level: int) -> QAExample:
    """Four inputs and 3 gates per level, each fed by earlier values. The question asks for the last
    `level` + 1 gates."""
    inputs = [f"i{n}" for n in range(1, 5)]
    values = {name: rng.random() < 0.5 for name in inputs}
    lines = [f"{name} = {int(value)}" for name, value in values.items()]
    gates = [f"g{n}" for n in range(1, 3 * level + 1)]
    for gate in gates:
        a, b = rng.sample(list(values), 2)
        word = rng.choice(list(_GATES))
        lines.append(f"{gate} = {a} {word} {b}")
        values[gate] = _GATES[word](values[a], values[b])
    outputs = gates[-level - 1 :]
    question = (
        f"A circuit: {'; '.join(lines)}. What are {', '.join(outputs)}? "
        "Give a 0 or a 1 for each, with commas between them."
    )
    bits = [int(values[gate]) for gate in outputs]
    flipped = [[bit ^ (at == place) for at, bit in enumerate(bits)] for place in range(len(bits))]
    return QAExample(question=question, answer=_join(bits), near=tuple(map(_join, flipped)))


def _join(bits: list[int]) -> str:
    return ", ".join(map(str, bits))
