"""Customer-service environment: a store with a database, a policy, tools and a simulated user.

store_api.py  the tools and the policy
store.py      the database and its operations
scenarios.py  generated customer intents, by level
taskset.py    the environment `service`
"""
