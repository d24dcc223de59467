"""Style and scripts of the page."""
