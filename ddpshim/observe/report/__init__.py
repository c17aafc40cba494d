"""Builds the report of a run from its ranks' records, as Markdown or one page of HTML. Imports no torch."""
