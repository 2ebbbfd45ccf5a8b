"""`python -m paddock`: the command line."""

from paddock.cli.__main__ import main

if __name__ == "__main__":
    main()
