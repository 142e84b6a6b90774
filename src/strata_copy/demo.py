"""The command `demo`: a conversation moved with and without this library, timed, every byte compared."""

from __future__ import annotations

import click
from rich.console import Console

from strata_copy import CopyError, presets, runtime
from strata_copy.chosen import PEERS_OPTION, Pairs, numbers, open_runtime
from strata_copy.demo_copies import TOKENS, demo_copies
from strata_copy.demo_pool import demo_pool
from strata_copy.peers import mode as p2p_mode
from strata_copy.stages import Stages

TOKENS_HELP = f"Length; may be given several times. [default: {', '.join(map(str, TOKENS))}]"


@click.command()
@click.option(
    "--format",
    "formats",
    type=click.Choice([*presets.QWEN3_8_CELLS, "all"]),
    default="int8",
    show_default=True,
    help="Of the K/V.",
)
@click.option("--tokens", type=click.IntRange(min=1), multiple=True, help=TOKENS_HELP)
@click.option("--draft", is_flag=True, help="With the K/V of the draft.")
@click.option("--mode", type=click.IntRange(0, 2), default=0, show_default=True, help="Where the K/V is; see above.")
@click.option("--devices", type=click.IntRange(1, 16), default=1, show_default=True, help="A stage on each; see above.")
@click.option("--split", callback=numbers, help="The first layers of the stages behind the first, as in 3,20.")
@PEERS_OPTION
@click.option("--memory", type=click.IntRange(min=1), help="Bytes that both sessions may take.")
@click.option("--pool", is_flag=True, help="Conversations that take turns in slots; see above.")
@click.option("--json", "as_json", is_flag=True, help="One JSON list, a row for each length and direction, or turn.")
def demo(
    formats: str,
    tokens: tuple[int, ...],
    draft: bool,
    mode: int,
    devices: int,
    split: tuple[int, ...],
    peers: Pairs | None,
    memory: int | None,
    pool: bool,
    as_json: bool,
) -> None:
    """Copies a conversation from a main session to a batch slot and back.

    "save" is what engines do today (through pageable memory), "direct" is this library. Times are the best of 3; every
    byte of the target is compared with what it must hold.

    Mode 0: all of a session is on the device, and the ceiling is one plain copy within it. Mode 1: the K/V is streamed,
    complete in pinned memory; the ceiling is one plain copy from there to the device. Mode 2: as 0, but the draft's K/V
    is complete in pinned memory, beside a ring on the device that the engine fills itself; it needs --draft.

    With --devices N the layers are split over devices 0 to N-1, as evenly as it goes or as --split says, the draft on
    the last; the ceiling is a plain copy on each at once. In mode 0 there are two more rows, between a session that is
    on device 0 as a whole and one on device 1: the ceiling is a plain copy from one to the other. The host runtime has
    as many devices as are asked for.

    With --pool 5 conversations take turns in 4 slots. They have a prefix of --tokens in common (by default the longest
    of the lengths that fits) and grow by 64 tokens a turn. The conversation whose turn it is is in no slot: another one
    is parked, and it takes that slot, on the save path and by a pool in pinned memory. A row for each turn, and one for
    all.

    Ends with status 1 where a byte differs or a copy fails.
    """
    if mode == 2 and not draft:
        raise click.UsageError("mode 2 is the draft's: --draft is needed")
    stages = stages_of(devices, split)
    try:
        p2p_mode()
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from wrong
    why = open_runtime(devices, peers)
    err = Console(stderr=True, highlight=False, markup=False)
    err.print(f"{runtime.describe()['kind']} runtime, {runtime.device_name(0)}: {why}", soft_wrap=True)
    names = list(presets.QWEN3_8_CELLS) if formats == "all" else [formats]
    layouts = [presets.qwen3_8_flash_next(name, draft=draft) for name in names]
    try:
        if pool:
            demo_pool(layouts, tokens, mode, stages, memory, err, as_json)
        else:
            demo_copies(layouts, tokens, mode, stages, memory, err, as_json)
    except ValueError as wrong:  # of the environment
        raise click.UsageError(str(wrong)) from wrong
    except (CopyError, runtime.CudaError, MemoryError) as failure:
        raise click.ClickException(f"{type(failure).__name__}: {failure}") from failure


def stages_of(devices: int, split: tuple[int, ...]) -> Stages:
    if not split:
        return Stages.even(devices, presets.QWEN3_8_LAYERS)
    if devices == 1:
        raise click.UsageError("--split is for several devices: --devices is needed")
    if len(split) != devices - 1 or any(
        a >= b for a, b in zip((0, *split), (*split, presets.QWEN3_8_LAYERS), strict=True)
    ):
        raise click.UsageError(
            f"--split has the first layers of {devices - 1} stages, each above the one before, from 1 to "
            f"{presets.QWEN3_8_LAYERS - 1}; it is {','.join(map(str, split))}"
        )
    return Stages(split)
