"""The rooms behind `explain`, `draw`, `status` and the demo: what is shown, as values, and how it reads.

What is asked comes from a command line (`typed`, before torch is imported) or from a program (`asked`). Both planners
answer it (`plans`). The answer is a value that prints: two plans (`explanation`), many tensors (`flow`), a mesh
(`drawing`), the groups of this process (`groups`). All print by `words` and `screen`; `pictures` draws who sends what.
"""
