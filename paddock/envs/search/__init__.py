"""Search: pages, an index over them, tools to read them, questions that take several look-ups.

solver.py     a player that looks up one step after the other
knowledge_graph.py  a small world of people, towns and things
bm25.py       BM25, in memory or in a folder
pages.py      facts into pages and back
questions.py  questions of several hops, and three filters
tools.py      search, open, find
taskset.py    the worlds `search` and `search-file`
"""
