"""Process groups of meshes: settings, names, the table that they stand in, how they are made and found."""
