"""Device memory that stays where it is while its process is checkpointed: the preload, the keeper
of its descriptors, and what a dump asks of them.
"""
