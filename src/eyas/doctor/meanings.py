"""What the doctor's own words mean, in a sentence each: said on the page where the word stands."""

REGIONS = {
    "sink": "sink: the first 4 tokens",
    "prompt": "rest of the prompt",
    "verified": "verified answer",
    "own": "its own drafts",
}
"""Where a drafter can look, as the legend calls it."""

STATEMENTS = {
    "drift": "The drafter reads its own last state at every depth. If that grows, deep drafts see states that training "
    "never showed.",
    "flat_feedback": "The drafter reads its own last state at every depth. It keeps its size, so deep drafts see what "
    "shallow ones saw.",
    "unsure_growth": "The drafter reads its own last state at every depth; growth from depth to depth is called drift.",
    "fades": "Of the drafts whose predecessors were all accepted, fewer are accepted the deeper they are.",
    "holds_depth": "Of the drafts whose predecessors were all accepted, deep ones are accepted as often as the first.",
    "unsure_depth": "Of the drafts whose predecessors were all accepted, how many are accepted at each depth.",
    "imbalance": "The drafter reads states of several layers of the target, joined by one matrix (fc). One of them "
    "makes up nearly all of what comes out.",
    "balanced": "The drafter reads states of several layers of the target, joined by one matrix (fc). None of them "
    "makes up nearly all of what comes out.",
    "coverage": "The drafter knows only part of the target's vocabulary, and cannot propose the rest.",
    "calibration": "Where the drafter says 80 %, it should be right in 80 % of cases.",
    "no_fault": "Each known fault of a checkpoint was undone in memory and drafting tried again. A repair that helps "
    "names a fault; none did.",
    "unsure_faults": "Each known fault of a checkpoint was undone in memory and drafting tried again. A repair that "
    "helps names a fault.",
    "too_few_prompts": "What a few prompts show may be chance.",
}
"""By the name of a statement."""

DRIFT = (
    ("depth", "the place of a token in a draft: depth 1 is the first that the drafter proposes, depth 2 builds on it"),
    ("round", "one draft and its check by the target, which accepts tokens up to the first miss"),
    (
        "fed-back state",
        "what a depth hands to the next: from depth 2 on the drafter reads its own state, not the target's",
    ),
    ("drift", "growth of the fed-back state from depth to depth, in per cent per depth; 0 is healthy"),
    ("RMS", "root mean square, the size of a state's numbers"),
    ("band", "95 % interval; over prompts, and for shares of rounds at least as wide as Wilson's"),
)
FUSION = (
    ("auxiliary state", "a hidden state of the target, after one of its layers, that the drafter reads"),
    ("RMS given", "its size as the target gives it"),
    ("RMS read", "its size as fc reads it, after a norm where there is one"),
    ("share", "its part of the fused input: |W x| of this state / the sum over states"),
)
ROBUSTNESS = (
    ("condition", "the same prompts put, computed or answered in another way"),
    ("kept", "acceptance length under the condition / without it, on the same prompts; behind it the 95 % interval"),
    ("noise", "random numbers added to every state that the drafter receives, in parts of the state's own RMS"),
    ("BOS", "the token with which a text begins"),
    ("tool traffic", "calls of functions and their results, as JSON"),
)
REPAIRS = (
    ("ratio", "accepted drafts with the repair / as the drafter is; above 1 the repair helps"),
    (
        "surprise",
        "by how many nats the target's tokens surprise the repaired drafter more: - ln of the probability that it "
        "gives them; below 0 the repair helps",
    ),
    ("helps", "both can hardly be chance: the repair names a fault"),
)
