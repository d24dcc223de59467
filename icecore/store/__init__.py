"""The repository: objects, codecs, shards, maps, log and collection; it knows no process and no
machine.
"""
