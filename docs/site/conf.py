"""Builds the documentation site from the Markdown of this repository: `python -m docs.site.build`."""

project = "ddpshim"
author = "The ddpshim developers"
copyright = author

extensions = ["myst_parser"]
root_doc = "docs/site/index"
include_patterns = ["*.md", "docs/*.md", "docs/*/*.md", "evidence/*.md", "examples/*.md", "examples/*/*.md"]
include_patterns += ["patches/README.md"]
exclude_patterns = ["out", ".venv", "tests"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "ddpshim"
