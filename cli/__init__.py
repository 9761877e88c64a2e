"""The commands of `farloop`, one module each."""

import sys

from farloop.cli.interrupts import take_signals

if sys.argv[0] == "-m" or sys.argv[0].endswith("/farloop"):  # before what `farloop`, or `python -m`, imports next
    take_signals()
