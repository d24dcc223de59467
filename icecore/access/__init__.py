"""What a client brings to a repository: its place, its passphrase, and a record of it that a
repository has to match.
"""
