"""What a mesh is: layouts over ranks, and the state that a root and its views share."""
