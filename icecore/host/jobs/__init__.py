"""Jobs: started in namespaces of their own, recorded, and found again."""
