"""What says that a job has to leave its machine: a command or a URL that is asked in turn.

Signals are the supervisor's own affair. Clouds announce the end of a spot machine in other ways:
a metadata URL that begins to answer, or a program of the provider's that ends with status 0.
"""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException

from icecore.host.jobs.shell import run_shell

POLL_SECONDS = 5.0
_ANSWER_SECONDS = 4.0


class Notices:
    """Asks in a thread of its own until something says that the job has to leave.

    Args:
        command: Shell command; its status 0 is a notice. Empty: none.
        url: Its status 200 is a notice. Empty: none.
        environment: The command's.
        told: Gets the reason, once.
    """

    def __init__(
        self, command: str, url: str, environment: Mapping[str, str], told: Callable[[str], None]
    ) -> None:
        self._command = command
        self._url = url
        self._environment = environment
        self._told = told
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="notices", daemon=True)
        if command or url:
            self._thread.start()

    def close(self) -> None:
        """Stop asking."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(2 * _ANSWER_SECONDS)

    def _ask(self) -> None:
        while True:
            why = self._said()
            if why:
                self._told(why)
                return
            if self._over.wait(POLL_SECONDS):
                return

    def _said(self) -> str:
        if self._command:
            try:
                status = run_shell(
                    self._command,
                    self._environment,
                    seconds=_ANSWER_SECONDS,
                    output=2,
                )
            except OSError:  # also TimeoutError
                status = 1
            if status == 0:
                return f"{self._command!r} ended with status 0"
        if self._url:
            try:
                with urllib.request.urlopen(self._url, timeout=_ANSWER_SECONDS) as answer:
                    if answer.status == 200:
                        return f"{self._url} answers"
            except (OSError, ValueError, HTTPException):  # as 404, which means that nothing is due
                pass
        return ""
