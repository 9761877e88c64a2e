"""A process on virtual time, for tests of what runs over the ports: no thread, no sleep."""

from farloop.sim.virtual_time import EventQueue, Process, VirtualClock, VirtualWorker

JOB_S = 0.01
"""That every job of a worker takes."""


class VirtualHost:
    """One process with a clock and two workers. `errors` are those that would end it."""

    def __init__(self) -> None:
        self.agenda = EventQueue()
        self.process = Process(self.agenda)
        self.clock = VirtualClock(self.process)
        self.storage = VirtualWorker(self.process, lambda: JOB_S)
        self.compute = VirtualWorker(self.process, lambda: JOB_S)
        self.errors: list[Exception] = []

    def fatal(self, error: Exception) -> None:
        """To be handed to what runs here."""
        self.errors.append(error)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self.agenda.step():
            pass

    def run_for(self, seconds: float) -> None:
        over: list[bool] = []
        self.agenda.after(seconds, lambda: over.append(True))
        while not over:
            self.agenda.step()
