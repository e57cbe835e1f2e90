"""Code for single releases of torch. What lies under `distributed/` is written for the newest release.

A row of `series` with a range of releases puts each of these functions in place. Some add what an old release lacks;
others must agree with the code of the release that runs. None goes upstream. Where our code calls functions of torch
that differ between releases, see `distributed/_torch.py`.
"""
