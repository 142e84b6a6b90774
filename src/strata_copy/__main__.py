"""python -m strata_copy"""

from strata_copy.cli import main

main()
