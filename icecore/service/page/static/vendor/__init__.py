"""Libraries of the page, from their npm packages; `tools/vendor-assets` writes them."""
