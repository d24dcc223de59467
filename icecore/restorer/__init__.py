"""Bring a snapshot back: plan, fetch, place, resume; no process ever runs on a missing page."""
