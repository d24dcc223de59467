"""What keeps a repository small and whole: forget, collect, compact, check, repair."""
