"""`python -m qpt ...` is `qpt ...`; torchrun starts it so."""

from qpt.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
