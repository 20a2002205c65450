"""`python -m eyas`: the command line without the console script, as under torchrun."""

from eyas.cli.entry import main

if __name__ == "__main__":
    main()
