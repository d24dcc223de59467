"""Jobs: started in namespaces of their own, recorded, and found again.

- `registry`: the jobs of this node; `job`: one instance of a job, and `description` its record
- `new_job`: what is decided before a job starts; `start` and `launch`: how its init (`init.c`) is
  started in its namespaces; `restoring`: an instance that CRIU is about to restore
- `keepers`: where the keepers of instances' GPU memory are
- `namespaces`: what a job has for itself; `mounts`: files mounted for it; `gpu`: settings of GPU
  jobs
- `shell`: commands that the user configures
"""
