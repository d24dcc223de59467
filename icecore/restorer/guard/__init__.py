"""The process that outlives the restorer and kills a tree that is not complete."""
