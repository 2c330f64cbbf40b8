"""Constants of the policy, each with the property that it protects."""

from __future__ import annotations


# Costs: measured seconds (`times`)

# A stall is outvoted, and so is the first run of a size: measurements of which the median is taken.
LAST_MEASUREMENTS = 9
# Two measurements in a row that are this many times shorter than the level are believed.
FAR = 1.3
# A size tells the pace only once it is known itself: measurements that this takes.
KNOWN = 3
# No measurement makes a pace of nothing or of forever: the largest one, and the smallest is its inverse.
LARGEST_PACE = 1000.0
# A batch is neither all overhead nor all rows: the part of a cycle that is taken to be the same for any number.
FIXED_PART = 0.5

# Acceptance (`rates`)

# Rates follow the text: outcomes that a rate remembers, for each row that it is fed by.
WINDOW = 32
# Drafting is how one learns, so the first expectation is a good one.
FIRST_RATE = 0.65
# A few outcomes outweigh every expectation: those that it counts for at the first position, at later ones (the
# position before), and for one row (that of all rows).
FIRST_WEIGHT = 4.0
PRIOR_WEIGHT = 2.0
ROW_PRIOR_WEIGHT = 6.0
# The next text may be another one: outcomes that earlier calls count for, per row; that one call counts for among
# them; and that are remembered of all calls.
CALLS_WEIGHT = 3.0
WEIGHT_OF_CALL = 16.0
MEMORY = 64.0
# Drafters that may be better than is known are tried: standard deviations that are added to a rate.
OPTIMISM = 1.5
# A change of the text is followed at once: a run of equal outcomes that is so improbable is one, and the mean of
# about the last six, which counts for three, takes over.
IMPROBABLE = 1e-3
RECENT_PART = 1 / 6
WEIGHT_OF_RECENT = 3.0
# Estimates of a drafter are corrected by what was accepted, and follow the text: expected tokens that
# are remembered, that the correction of earlier calls counts for, and that a row's first one counts for.
RATING_WINDOW = 64.0
RATING_WEIGHT = 8.0
ROW_RATING_WEIGHT = 2.0
# Scores that were too low once do not make every match look like a copy: the largest correction.
LARGEST_RATING = 2.0

# Choice

# Lengths, sizes and drafters do not flap: what another one must promise, and what drafts must promise beside none.
HYSTERESIS = 1.02
LEAST_GAIN = 1.015
# Choosing costs little beside a cycle: cycles between two plans with drafts and without, drafts between two sizes.
PLAN_EVERY = 4
PLAIN_PLAN_EVERY = 8
# A plan takes longer for more rows, and what it rests on changes no faster: as many rows more as this make the pauses
# between plans longer by one of those above.
PLAN_ROWS = 8
# Nor does watching: cycles between two that are timed where nothing is drafted, a divisor of those between plans.
PLAIN_OBSERVE_EVERY = 4
SIZE_EVERY = 8
# A useless drafter costs the first call little: one this many times slower than none is measured once only.
CLEARLY_SLOWER = 1.5
# A first call begins where nodes are cheap: the largest length to begin with, by device type. On a CPU the time of
# 16 nodes is that of arithmetic rather than of reading the weights, and more nodes take longer in proportion.
LARGEST_FIRST_LENGTH = {"cpu": 15}
# Searches end: positions that are reached so seldom are not looked at.
NEGLIGIBLE = 1e-3
# Times of tree sizes are soon known: few sizes, in steps of at most a half.
TREE_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Ratings of ranks follow the text: the part that a new draft has in them.
RANK_PART = 0.1
# The worth of a second follows the text: the share of tokens and seconds that remains after a cycle.
RATE_MEMORY = 0.97

# Trials

# A useless drafter costs at most two parts in a hundred: trials get one of all time, the noise takes the rest.
TRIAL_SHARE = 0.01
# A short first call learns something, and a long one does not save up for a spree: budgets in plain cycles.
FIRST_BUDGET = 2.0
LARGEST_BUDGET = 8.0
# One trial's outcome is known before the next: cycles between two.
TRIAL_EVERY = 8
# Costs that have fallen are believed: a trial that takes less than this part of the expected time is repeated.
CHEAP = 0.7
# The costs of a drafter are known before they are weighed: wanted drafts that are made without asking for them.
FIRST_DRAFTS = 2
# Trials of a second drafter cost few tokens: they are made where retrieved drafts promise less.
LITTLE = 1.0
