"""Bodies for single releases of torch. Those under `distributed/` are written for the newest release.

A row of `series` with a range of releases puts each of them in place. Some add a function that an old release lacks,
others must agree with the code of the release that runs. None goes upstream. Functions of torch that bodies call, and
that differ between releases, are in `distributed/_torch.py`.
"""
