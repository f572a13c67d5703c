"""How Sphinx builds the site: ``make docs``."""

import memplan

project = "memplan"
author = "The memplan authors"
copyright = author
version = release = memplan.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "memplan"

# A name in single backticks is a link where there is such a name, and code where there is none.
default_role = "py:obj"

# Headings can be linked to as on a code host: `results.md#on-a-gpu`.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
python_use_unqualified_type_names = True
