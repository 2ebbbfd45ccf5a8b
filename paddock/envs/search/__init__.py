"""Search environments: web pages, a BM25 index, browsing tools and multi-hop questions.

solver.py     scripted policy that follows the hops of a question
knowledge_graph.py  generated entities and facts
bm25.py       BM25 index, in memory or in a folder
pages.py      facts to pages and back
questions.py  multi-hop questions and their three filters
tools.py      search, open, find
taskset.py    the environments `search` and `search-file`
"""
