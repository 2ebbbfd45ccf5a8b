"""Mathematics: problems that are generated or read, and answers compared as mathematics.

verifier.py  whether two answers are the same
rows.py      the layouts of GSM8K and MATH
generate.py  arithmetic and algebra, by family and level
size_bound.py  how large an expression's numbers can be
taskset.py   the worlds `math` and `math-file`
"""
