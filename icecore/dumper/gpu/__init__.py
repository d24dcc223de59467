"""Device memory: moved by the driver, or copied where it is."""
