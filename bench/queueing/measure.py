"""Long copies that nobody waits for, and what the driver does badly: pinned to pinned, and pageable memory."""

from common.report import Result
from common.setting import Setting
from copies.measure import Bench
from queueing import long, pageable, ring, windows


def run(setting: Setting, long_copies: bool = True, rings: bool = False) -> Result:
    repetitions, warm_up = (2, 1) if setting.quick else (9, 3)
    result = Result("queueing", {"tokens": setting.tokens, "repetitions": repetitions, "warm_up": warm_up})
    bench = Bench(setting, result, repetitions, warm_up)
    setting.ceilings.measure()
    figures = long.rows(setting, result, long_copies)
    figures += ring.rows(setting, result, rings)
    figures += pageable.rows(setting, result)
    windows.measure(setting, bench)
    setting.check_ceilings(result)
    result.figures += [*figures, *bench.shares()]
    return result
