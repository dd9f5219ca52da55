"""`python -m stairwise`."""

from stairwise.cli import main

if __name__ == "__main__":
    main()
