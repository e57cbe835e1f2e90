"""The engine that patches. Rows say what is patched with what; all are applied or none, and originals come back.

Nothing here knows torch. This file imports nothing, since `python -m torch_overlay run` loads `import_hook` in every
Python process of a job.
"""
