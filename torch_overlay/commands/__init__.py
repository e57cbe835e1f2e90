"""The commands of ``python -m torch_overlay``, a module each: `add_arguments` says what it takes, `act` does it.

A module is imported when its command is used, and none imports torch before its arguments are read.
"""
