"""python -m strata_copy"""

from strata_copy.cli import main

if __name__ == "__main__":
    main()
