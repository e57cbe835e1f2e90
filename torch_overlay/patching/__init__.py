"""The engine that patches. `Patch` rows say what is replaced by what; all are applied or none, and undone by identity.

Start at `patch.py`, then `engine.py`. Nothing here knows torch. This file imports nothing, since `python -m
torch_overlay run` loads `import_hook` in every Python process of a job.
"""
