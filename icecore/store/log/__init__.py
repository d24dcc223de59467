"""The log of a repository: sessions, transactions, the catalogue, keys and the index."""
