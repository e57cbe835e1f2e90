"""Before compiled code makes views."""

# Attributes that are never pickled: they are made again from the others.
OWN_STATE = ("_view", "_shared_state", "_pg_registry")
