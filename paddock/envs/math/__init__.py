"""Mathematics environments, generated or from files, with symbolic comparison of answers.

verifier.py  equality of two answers
rows.py      GSM8K and MATH rows
generate.py  arithmetic and algebra problems, by family and level
size_bound.py  upper bound on the size of an expression's numbers
taskset.py   the environments `math` and `math-file`
"""
