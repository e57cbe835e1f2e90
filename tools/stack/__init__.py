"""The upstream stack: the overlay's rows and bodies rendered as commits on a PyTorch source tree.

`message` reads the series and what each patch carries; `ours` has our files as upstream has them;
`gather` takes what goes into one file of torch, `lay` puts it there; `render` makes all files of one prefix; `tree`
reads and writes the target, `history` makes commits, `mail` files for git am; `lint` formats with upstream's settings;
`check` runs our suites against a patched copy.
"""
