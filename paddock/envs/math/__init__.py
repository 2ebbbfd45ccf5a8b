"""Mathematics: problems that are generated or read, and answers compared as mathematics.

equal.py     whether two answers are the same
files.py     the layouts of GSM8K and MATH
generate.py  arithmetic and algebra, by family and level
size.py      how large an expression's numbers can be
world.py     the worlds `math` and `math-file`
"""
