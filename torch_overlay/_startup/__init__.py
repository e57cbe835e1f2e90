"""A folder for PYTHONPATH: Python runs the ``sitecustomize.py`` in it at the start of every process of a job."""
