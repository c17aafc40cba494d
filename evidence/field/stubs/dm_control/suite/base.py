"""The class that ACT's tasks derive from."""


class Task:
    pass
