"""What `explain`, `draw`, `status` and the demo show.

A question comes from a command line (`typed`, which imports no torch) or from a program (`asked`). The planner answers
it (`plans`). Each answer is a value that prints: a plan (`explanation`), what many tensors send (`flow`), a mesh
(`drawing`), the groups of this process (`groups`). They print by `words` and `screen`; `pictures` draws who sends what.
"""
