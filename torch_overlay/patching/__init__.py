"""The engine: rows that say what is patched with what, applied all or none and taken back by identity. Knows no torch.

Imports nothing, since `python -m torch_overlay run` loads `import_hook` in every Python process of a job.
"""
