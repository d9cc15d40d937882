"""Configure Sphinx, which builds the documentation by ``make docs``."""

from __future__ import annotations

import lightning_dist

project = "lightning-dist"
author = "the authors of lightning-dist"
html_title = "lightning-dist"
html_show_copyright = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
exclude_patterns = ["_build"]

myst_heading_anchors = 3  # The pages link to each other's headings as GitHub names them.

# Lightning's base classes have hundreds of members, which their own documentation describes.
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_mock_imports = ["ray"]  # It is an extra that the documentation does not install.
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

release = getattr(lightning_dist, "__version__", "")
