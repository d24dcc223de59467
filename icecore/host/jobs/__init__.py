"""Jobs: started in namespaces of their own, recorded, and found again.

- `registry`: the jobs of this node; `job`: one instance of a job
- `start` and `launch`: how a job's init (`init.c`) is started in its namespaces
- `namespaces`: what a job has for itself; `mounts`: files mounted for it; `gpu`: settings of GPU
  jobs
- `shell`: commands that the user configures
"""
