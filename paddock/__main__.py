"""`python -m paddock`: the front door, by its shortest name."""

from paddock.cli.__main__ import main

if __name__ == "__main__":
    main()
