"""Where objects lie: a directory, a bucket, memory; and the wrappers around any of them."""
