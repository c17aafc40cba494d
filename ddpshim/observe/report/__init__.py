"""Builds the report of a run from its ranks' records, as Markdown or one HTML page. Imports no torch."""
