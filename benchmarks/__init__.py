"""Measures what serving costs, what step-level batching gives, and what a user would write instead (see README.md).

workload         the requests, and the instants at which they come
clients, load    the load generator: closed and open loops, a record of each request
baselines        what a user would write instead, a file each
fleet            starts our server and the baselines, side by side
bare             the bare pipeline in a process of its own: requests one after another, and its forwards alone
limit            the time that the same work would take at best
plan             the arms, their sizes, and how long a run may take
bench            what the arms on servers share
rounds, once     the arms: those of every round, and those that run once
hops             where the milliseconds of one request go
idle             what a server with nothing to do costs
engine_overhead  what the engine itself adds to a step, and what waiting callers cost
fairness         sizes mixed, in the fair order and in the order of arrival
suite            runs the arms in turns, and makes figures of what they gave (figure, figures)
machine          the machine, the versions, the commit
balancer         what a balancer adds to a request: a command of its own
report, plots    tables and plots for people; also into the READMEs
"""
