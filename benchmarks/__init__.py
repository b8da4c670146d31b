"""Measures what serving costs and what step-level batching gives: `python -m benchmarks` (see README.md).

workload         the requests
bare             the bare pipeline in a process of its own: requests one after another, and its forwards alone
served           the real server, and load on it
limit            the time that the same work would take at best
idle             what a server with nothing to do costs
engine_overhead  what the engine itself adds to a step
suite            runs the arms in turns, and makes figures of what they gave
machine          the machine, the versions, the commit
report           a table for people; also into README.md
"""
