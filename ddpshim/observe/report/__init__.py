"""The report of a run: what its ranks have written down, as Markdown or as one page of HTML. Imports no torch."""
