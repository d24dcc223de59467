"""Fakes: what tests put in the place of hardware, drivers, networks and services.

GPUs, as the processes of a job call them (`tests/resident`, `tests/gpu/test_driver.py`):

- `fake_libcuda.c`: libcuda. Memory is real, contexts, captures and IPC are modelled, and a driver's
  thread locks and checkpoints the process. It also has the calls by which icecore has another
  process locked and checkpointed. `worker_calls.c` adds those of the GPU worker.
- `machine`: a machine with such GPUs (a tmpfs each) and a keeper, and CUDA processes on it
  (`target`, `stress.c`).
- `joined`: jobs on such a machine that are dumped and restored. Their programs are `job`, `ring`
  (ranks that share memory) and `late`.

GPUs, as CRIU and icecore see them in a process (`tests/gpu`, `tests/service`,
`benchmarks/device_file.py`):

- `fake_cuda` with `fake_device.c`: a process with a driver's device files, mappings and thread. It
  makes no CUDA call.
- `world`: a machine with GPUs for such processes. It needs neither root nor mounts.
- `amdgpu_plugin.c`: CRIU's plugin for AMD GPUs (`tests/gpu/test_amd.py`).

`foreseen` knows what an undisturbed process of either kind writes.

Networks and services:

- `canned_s3`: an S3 server that answers as it is told (`tests/cli`, `tests/store`).
- `moto_server`: moto's S3 server, one of the back ends of the store's conformance suite.
- `bad_proxy`: a network that loses requests and replies (`tests/cli`).
- `kubelet`: the kubelet, for one container (`tests/service/test_kubernetes.py`).

icecore's side of the fake driver is in the package, because the processes of a dump choose it by
``ICECORE_CUDA=fake:DIRECTORY``: `icecore.host.cuda.fake` makes the driver's calls, and
`icecore.host.resident.fake_memory` is the memory of the GPU worker. `fake_control.h` is the page
through which calls reach the driver's thread in both kinds of process. A back end of the store that
fails on purpose is `icecore.store.backend.faulty`.

SeaweedFS (`tests.seaweedfs`), CRIU and Slurm are the real ones.
"""
