"""Before compiled code makes views."""

# What a mesh keeps of its universe.
OWN_STATE = ("_view", "_shared_state")
