"""What differs between releases. Bodies under `distributed/` are written for the newest and don't ask.

A release that lacks a function which they call gets one: a row of the series with `Kind.ADD` and the releases that it
is for. What must agree with the very release that runs, and so never goes upstream, is here by row. What bodies
call themselves and differs is in `distributed/_torch.py`, with a branch on the release.
"""
