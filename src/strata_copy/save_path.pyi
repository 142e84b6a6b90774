import numpy as np
from numpy.typing import NDArray

def save_and_restore(runs: NDArray[np.int64], stream: int) -> None: ...
