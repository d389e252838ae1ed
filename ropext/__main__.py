"""`python -m ropext`."""

from ropext.cli import main

main()
