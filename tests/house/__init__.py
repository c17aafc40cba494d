"""The repository itself: layout, types, documentation, packages."""
