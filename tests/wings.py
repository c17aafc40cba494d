"""The order of the package's folders, which tests/house/test_layout.py checks."""

# Each folder imports only those above it, and itself.
WINGS = [
    "process",
    "failures",
    "job",
    "shares",
    "model",
    "checkpoint",
    "evaluation",
    "observe",
    "rows",
    "trainers",
    "robomimic",
    "launch",
    "tools",
]
# The files beside the folders: all may import them, and they import only each other.
OPEN = [
    "adapters",
    "errors",
    "lazy",
    "options",
    "reading",
    "variables",
    "version",
]
# These may import anything, inside functions.
FACES = ["__init__", "__main__", "auto", "testing"]
CHOOSE_BY_NAME = {"launch.rank": {"tools"}}  # inside functions
