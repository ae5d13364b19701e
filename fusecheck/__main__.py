"""The entry point. Until the command line has its own handlers, Ctrl-C ends the process at once, without a traceback."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from fusecheck.cli import main  # its imports are what may be interrupted

if __name__ == "__main__":
    main()
