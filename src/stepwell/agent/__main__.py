"""`python -m stepwell.agent --run DIR`: how a trainer starts the agent. Users start it with `stepwell agent`."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys

from stepwell.agent.client import CANNOT_START, READY_BYTES_MAX
from stepwell.agent.place import place_of
from stepwell.agent.server import run_agent
from stepwell.errors import RunBusyError, StepwellError
from stepwell.tiers.posix import is_permanent


def main() -> int:
    parser = argparse.ArgumentParser(prog="stepwell agent")
    parser.add_argument("--run", required=True)
    parser.add_argument("--service", action="store_true")
    parser.add_argument("--ready-fd", type=int)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        run_agent(arguments.run, place_of(arguments.run), service=arguments.service, ready_fd=arguments.ready_fd)
    except RunBusyError as error:
        logging.info("%s", error)  # another agent won the race: the trainer meets that one
    except (StepwellError, OSError) as error:
        logging.error("%s", error)
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if arguments.ready_fd is not None and (full or is_permanent(error) or isinstance(error, StepwellError)):
            text = str(error)
            if isinstance(error, OSError) and not isinstance(error, StepwellError):
                text = ": ".join(filter(None, [os.strerror(error.errno or 0), error.filename]))
            os.write(arguments.ready_fd, CANNOT_START + text.encode(errors="replace")[:READY_BYTES_MAX])
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
