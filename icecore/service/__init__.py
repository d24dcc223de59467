"""The service: scheduled snapshots, preemption and restarts of jobs, and what shows them.

- `interval`: how often a job is snapshotted.
- `record`: what is known of a job from one supervisor to the next.
- `supervision`: runs one job.
- `api`: the node service.
- `facts`, `page`: what the node service's pages show.
- `metrics`, `scrape`: what Prometheus reads.
"""
