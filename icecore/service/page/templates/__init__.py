"""Templates of the page."""
