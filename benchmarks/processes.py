"""What is measured in a process of its own, with gnnfast on or off in it from the start: it answers what the benchmark asks."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any

from gnnfast.sides import own_process


class Ended(RuntimeError):
    """A process that ended before it answered."""


class Apart:
    """A process of ``gnnfast bench ARGUMENTS``, which calls :func:`serve`, with gnnfast ``on`` or off and more ``variables`` in its
    environment, run by the command ``prefix`` if there is one."""

    def __init__(self, *arguments: str, on: bool, variables: dict[str, str] | None = None, prefix: tuple[str, ...] = ()) -> None:
        command, environment = own_process("gnnfast.cli:main", "bench", *arguments, on=on, flags=("-W", "ignore"))
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([*prefix, *command], env=environment | (variables or {}), **pipes)

    def ask(self, what: str, *arguments: Any) -> Any:
        """What a method of what is served returns. Raises RuntimeError for what it raises, and Ended."""
        self.send(what, *arguments)
        return self.answer()

    def send(self, what: str, *arguments: Any) -> None:
        """Asks without waiting; each has an answer."""
        assert self._process.stdin is not None
        try:
            pickle.dump((what, *arguments), self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # there will be no answer

    def answer(self) -> Any:
        assert self._process.stdout is not None
        try:
            found = pickle.load(self._process.stdout)
        except EOFError:
            raise Ended("the process that measures it ended") from None
        if isinstance(found, Exception):
            raise found
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(measured: Any) -> int:
    """Calls the methods of ``measured`` that are asked for until nobody asks any more."""
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what others print
    while True:
        try:
            what, *arguments = pickle.load(asked)
        except EOFError:
            return 0
        try:
            found = getattr(measured, what)(*arguments)
        except Exception as error:
            found = RuntimeError(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        pickle.dump(found, answers)
        answers.flush()
