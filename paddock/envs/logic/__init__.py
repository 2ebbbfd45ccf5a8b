"""Logic environment: generated puzzles with exactly one solution, by family and level.

circuit.py  output values of a logic circuit
clues.py    clue selection until one solution is left
knights.py  knights and knaves
order.py    orderings of books, houses in a street
taskset.py  the environment `logic`
"""
