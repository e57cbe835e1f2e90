"""The upstream stack: the overlay's rows and bodies rendered as commits on a PyTorch source tree.

Start at `render.states`. `message` reads the series and what each patch carries, `ours` our files as upstream has them;
`lay` and `insert` change torch's files, `suites` its tests, by edits of text (`source`). `tree` reads and writes the
target, `lint` formats with upstream's settings, `rules` says what reviewers would refuse, `history` makes commits, and
`check` runs our suites on a patched copy.
"""
