"""Every tuned number of the depth policy, in one place. No torch.

None of them can change what is generated: they decide how deep is drafted and what is learnt from it, which costs time
or saves it. They were tuned in simulation (`tests/engine/simulated.py`) and on training prompts, never on evaluation
ones.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DepthPolicy:
    """How the controller, its estimates and the drift alarm behave."""

    # --- The controller: when to time plain steps, when to look at further candidates.
    small_pass_tokens: int = 4
    """Tokens of a plain pass up to which probes go deeper until one four times as large has been timed: among small
    passes costs jump, and a slope between two of them says little about the next."""
    plain_again_steps: int = 256
    """Steps after which a plain one is timed again: speculation is only as good as what it is compared with."""
    plain_again_in_doubt: int = 8
    close_gain: float = 1.2
    sure_samples: int = 10
    """The same as long as speculation promises less than this ratio and plain steps have been timed less than so
    often."""
    candidates_every: int = 16
    candidates_first: int = 16
    """Of the steps that draft, one in so many looks at further candidates, and so many do to begin with: noting `ranks`
    of them instead of one takes a few percent of a step."""
    captured_looks_every: int = 128
    captured_looks_first: int = 4
    """The same where passes are captured: a look grows a tree, which may take a third longer than the chain."""

    lessons_of_step: int = 16
    """Rounds of a step that are learnt from, at most: with hundreds, learning would take the host longer than the rest
    of the step. Requests take turns."""

    # --- Plans: how long one is kept.
    plan_steps: int = 8
    """Steps that a plan serves at most, unless there is news meanwhile: a pass was timed of which nothing was known."""
    plain_plan_steps: int = 32
    """The same for a plan that drafts nothing: without drafts there is little to learn, and probes are news."""
    plan_rounds_per_step: int = 16
    """One that drafts serves a step for every so many rounds that were seen: the first ones change a lot."""
    settled_plan_steps: int = 64
    """The most steps that one serves which was made again and again and stayed the same."""
    held_drafts: int = 4
    """Steps in a row that draft by one choice where passes are captured: to choose takes the host time in every one."""
    held_rounds_per_step: int = 8
    """To begin with, one for every so many rounds that were seen."""
    many_rows: int = 64
    held_drafts_of_many: int = 8
    """The same for so many requests, where choosing takes longest and the average of all changes least."""
    alike_to_hold: int = 4
    held_at_most: int = 4
    """So many choices alike in a row are held for twice as many steps, as many more for three times as many, and at
    most for so many times as many."""
    kept_plans: int = 64

    # --- Acceptance: beliefs before there is evidence, and how evidence fades.
    first_guess: float = 0.6
    """Acceptance of a drafter of which nothing is known."""
    guess_rounds: float = 2.0
    """What the guess weighs. A drafter that never hits loses about as many plain steps before it is seen through."""
    recorded_rounds: float = 8.0
    """What the acceptance that a drafter's folder has recorded weighs: so many rounds of today."""
    acceptance_memory: int = 400
    captured_acceptance_memory: int = 1500
    """Rounds after which an observation has faded to a third, unless they tell that something has changed; the same
    where passes are captured, choices are few and a wrong one lasts for many steps."""
    probe_memory: int = 12
    """Rounds that all which was known before a probe may weigh: probes are few, and ask how things are now."""
    trial_memory: int = 48
    """The same once a trial has paid."""
    decline_per_depth: float = 0.95
    """Acceptance of a depth, as a part of that of the depth before it, as long as nothing else is known."""
    request_memory: int = 32
    """Rounds of a request after which the same has happened to what they say about it."""
    request_tries: float = 5.0
    captured_request_tries: float = 20.0
    """Tries of its own that weigh as much as the belief that a request is like the others."""
    resting_decay: float = 0.99
    """How much of a request's own evidence is left after a step in which it did not draft."""
    latest_rounds: int = 24
    newest_rounds: int = 8
    """Rounds whose first drafts tell whether something has changed, and those that are believed if it has."""
    change_check_every: int = 4
    """Rounds between two looks at them."""
    surprise_errors: float = 4.0
    captured_surprise_errors: float = 6.0
    """Standard errors between the latest rounds and the estimate that are no accident."""
    collapsed_below: float = 0.05
    recovered_above: float = 0.25
    """Acceptance of the first draft below which a drafter is reported, and above which it is welcomed back."""
    confidence_bins: int = 10
    """Bins of confidence."""
    calibrated_depths: int = 3
    """Depths that have a calibration of their own; deeper ones share the last."""
    confidence_bin_tries: float = 4.0
    """Drafts of a bin that weigh as much as the drafter's own word."""
    offered_rounds: int = 32
    offered_fewest: int = 16
    """Rounds whose confidences tell what a part of all drafts would give, and how few are too few."""
    level_width: float = 0.25
    """Width of a level: requests whose log odds lie within it are taken for alike."""
    most_levels: int = 12
    """Levels above and below the drafter as a whole."""

    # --- Costs: buckets of token counts and their times.
    cost_window: int = 21
    """Times of a bucket that its median is taken from."""
    cost_samples: int = 2
    """Times that a bucket needs: the lower of two is no outlier, or both are."""
    target_buckets_per_octave: int = 8
    drafter_buckets_per_octave: int = 1
    """Buckets per octave of token counts, for the target and for the drafter, whose passes differ less."""
    host_buckets_per_octave: int = 2
    """The same of requests, for the host, whose time grows evenly with them."""
    host_samples: int = 8
    host_stale_after: int = 512
    """Where steps overlap: times that the host's of a depth needs, and timed steps of all depths after which those no
    longer count."""
    timed_repeats: int = 3
    """Steps behind one that was chosen for, and like it, that tell how long the host takes for such."""
    cost_stale_after: int = 1000
    """Observations of a curve after which a time no longer counts, and a bucket that had none since is forgotten."""
    cost_refit_every: int = 64
    """Observations between two looks at the slope and at what to forget."""
    cost_buckets_apart: float = 1.25
    """Buckets closer than this ratio do not tell a slope from noise."""
    host_bound: float = 1.05
    """Seconds from one overlapped step to the next, in parts of those of its passes, above which it is the host's."""
    cost_flattest: float = 0.1
    """Past what was measured, tokens are taken to cost at least this part of the average of those before them."""

    step_window: int = 41
    """The latest whole steps of a kind, whose median corrects its price."""
    step_trust: float = 8.0
    """How many of them weigh as much as the price itself."""

    # --- Exploration: drafting although it does not pay.
    probe_share: float = 0.005
    """Of all time, the part that probes may lose."""
    probe_credit: float = 3.0
    """Plain steps that probes may lose before that."""
    probe_part_of_gains: float = 0.05
    probe_most_put_by: float = 32.0
    """Of the time that drafts save, the part that is put by for probes, and the most of it, in plain steps."""
    probe_paid_wait: float = 12.0
    """Steps between probes at most, as long as that pays for them."""
    trial_requests: int = 4
    """Requests up to which there are trials, where passes are captured."""
    trial_streak: int = 2
    """Probes in a row that were accepted, after which one begins."""
    held_after_probe: int = 2
    """Then steps until there is a choice again behind a probe, since the next may follow at once."""
    trial_most_loss: float = 4.0
    """Plain steps that a trial may lose from where it stood best."""
    trial_rounds: int = 8
    """Steps that it is expected to take if it loses."""
    probe_shortest_wait: float = 4.0
    probe_longest_wait: float = 96.0
    probe_wait_growth: float = 1.5
    """Steps between probes: at first, at most, and how the wait grows with every probe that found nothing."""
    probe_streak: int = 3
    """Probes in a row that were accepted and yet did not bring speculation back: then it is its cost that forbids
    it."""
    probe_seldom: float = 128.0
    """Steps between probes as long as that is so."""
    probe_worse: float = 0.7
    """Acceptance, as a part of what it was then, below which a hit is news again."""
    hopeless_misses: int = 12
    """Probes without a hit, some 600 steps at their growing distance, after which a collapsed drafter follows nobody.
    Before that an answer may have gone through a passage that no drafter guesses, and be worth following behind it."""
    probe_hit_outweighs: int = 4
    """Misses that a hit makes up for: among hundreds of requests, one is hit by luck."""
    probe_resting_wait: float = 384.0
    """The fewest steps between requests that it then follows for a probe's sake."""
    resting_steps: int = 64
    """Steps that a choice holds while it follows nobody."""
    probe_most_loss: float = 2.0
    """Plain steps that one probe is charged at most: a shape's first step may hold a compilation, which comes once."""

    # --- Calibration of plans.
    calibration_memory: int = 400
    """Steps after which one has faded to a third. A tree that was given up is tried again some time."""
    calibration_trust: float = 48.0
    """Promised tokens after which what was kept weighs as much as the belief before it."""

    # --- Siblings: candidates of the drafter behind the first.
    ranks: int = 8
    """Candidates of the drafter whose rank is told apart."""
    sibling_memory: int = 400
    """Looks after which one has faded to a third."""
    sibling_bins: int = 10
    """Bins of confidence."""
    sibling_bin_tries: float = 4.0
    """Candidates of a bin that weigh as much as the drafter's own word."""
    sibling_caution: float = 6.0
    """Misses that weigh against every share although nobody saw them: few looks must not make a tree look good."""

    # --- Suffix drafts.
    suffix_matches: tuple[int, ...] = (2, 4, 8, 16, 24)
    suffix_beliefs: tuple[float, ...] = (0.35, 0.5, 0.7, 0.85, 0.9)
    """Lengths of matches from which on they are told apart, and how often what followed such a match is believed to
    follow again, before there is evidence."""
    suffix_shares: tuple[float, ...] = (0.5, 0.8, 1.0)
    """The same for shares of votes; where all agree, one vote and several are told apart as well."""
    suffix_tries: float = 6.0
    """Drafts of a kind that weigh as much as the belief."""
    suffix_over_drafter: float = 1.1
    """What suffix drafts must promise, in parts of what the drafter does, to be verified in place of its own."""
    suffix_least_gain: float = 0.02
    """Tokens that the suffix drafts of a step must promise beyond their cost, for each request: less is noise."""
    suffix_surest: float = 0.98
    """The chance of each of the surest drafts: where those would not pay, nothing is looked up."""
    suffix_least_chance: float = 0.02
    """What follows a draft that is less likely to be accepted is not weighed."""
    suffix_trials: int = 12
    suffix_trial_tokens: int = 3
    suffix_trial_chance: float = 0.5
    """Passes with drafts that may be run to time them although nothing is known of their cost, how many drafts of a
    request they have, and the chance that the first must have."""

    # --- The drift alarm.
    drift_probes: int = 32
    drift_fewest_probes: int = 8
    """Check-ups that are judged together, and how few are too few."""
    drift_errors: float = 3.0
    """Standard errors on both sides of an estimate: the alarm is asked thousands of times a day."""
    bearable_growth: float = 2.0
    """Times its size at depth 1 that a state may have at a depth that is drafted. At depth 7 the shipped EAGLE-3.1
    drafter has 1.03, the EAGLE-3 control beside it 1.6 to 1.8 with no loss of acceptance, one whose `norm_output` was
    lost 5.0."""
    faded_below: float = 0.5
    faded_recovered_above: float = 0.7
    """Conditional acceptance of a depth in parts of that of depth 1: less has faded, more is back. Both of the drafters
    above have 0.9 and more at every depth; with `norm_output` lost it is 0.4 at depth 2 and 0.2 at depth 3."""
    drift_memory: int = 200
    """Drafts of a depth after which the fate of an earlier one has faded to a third."""
    drift_check_every: int = 16
    """Rounds between two looks at what was accepted."""


POLICY = DepthPolicy()
"""The policy in force."""
