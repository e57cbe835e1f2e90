"""The planner of redistributions: pure functions over plain values.

It imports the standard library only. So a plan is a value that is the same on every
rank, and its tests run in milliseconds, without a process group.

An axis is a mesh dim, a dim a tensor dim. A reduction is pending over the axes whose
placement is Partial; a term is the partial value of one rank.
"""
