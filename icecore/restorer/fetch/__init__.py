"""Fetching cells from the store, in the order in which they are needed."""
