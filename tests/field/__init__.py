"""The field's trainers, unedited: each in one process and on two ranks, compared. `python -m tests.field --help`"""
