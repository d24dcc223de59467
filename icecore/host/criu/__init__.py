"""CRIU: found, started, its images read and written, and the libraries that it is given."""
