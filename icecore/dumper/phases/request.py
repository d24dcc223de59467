"""What a caller asks of one dump."""

from __future__ import annotations

import msgspec

from icecore.dumper.options import DumpOptions
from icecore.dumper.stopping import StopRequest
from icecore.dumper.target import Target
from icecore.events import Sink
from icecore.host.criu.program import Criu
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.loop import LoopThread


class Request(msgspec.Struct, frozen=True):
    """One dump as its caller wants it; see `icecore.dumper.dump.dump`. ``stopping``, not the
    options, decides whether it ends the job.
    """

    repository: StoredRepository
    loop: LoopThread
    target: Target
    options: DumpOptions
    criu: Criu
    workdir: str
    emit: Sink
    stopping: StopRequest
