"""The commands of `farloop`, one module each."""

import sys

from farloop.cli.interrupts import install_handlers

if sys.argv[0] == "-m" or sys.argv[0].endswith("/farloop"):  # before what `farloop`, or `python -m`, imports next
    install_handlers()
