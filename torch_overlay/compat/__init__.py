"""What differs between releases. Bodies under `distributed/` are written for the newest and don't ask.

A release that lacks a function which they call gets one: a row of the series with `Kind.ADD` and the releases that it
is for. What must agree with the very release that runs, and so never goes upstream, is here: by row, or as a function
that others call, or, in a folder of `versions.OLDER`, as a module in place of one of `distributed/`.
"""
