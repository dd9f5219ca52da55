"""What pages say beside the advice, and `watch.advice` of long runs: every such sentence."""

NOTES = {
    "first lost": "The first batch that was not finite was number {number:,}.",
    # batch norm inside the network can make batches less noisy than independent pairs (docs/results/batch.md)
    "noise": "Taking pairs as independent, {part} of your loss at batch {batch} is sampling noise, and {now} of {d} "
    "dimensions can pass ½; at {larger} about {then} or more. With batch norm inside the network there may be less "
    "noise.",
    "noise only": "Taking pairs as independent, {part} of your loss at batch {batch} is sampling noise; a larger batch "
    "lowers the loss, but adds few dimensions or none.",
    "forecast": "The last {number} steps were forecast {miss:.0f} % off.",
    "not foreseen": "Most of the last {number} steps were not foreseen.",
    "judged again": "Judged at {looks} of {records} records, each as if it were the newest. What was said of a single "
    "record is not listed, unless it was an alarm.",
    "several": "{number} runs: {states}.",
    "nothing yet": "Nothing to show yet: {reason}.",
    "no spectrum": "No record has a spectrum so far.",
    "one in": "One in {stride} records was judged and is counted here.",
}


def noted(kind: str, /, **values: object) -> str:
    return NOTES[kind].format(**values)
