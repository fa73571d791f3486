"""Is one loss curve better than another, worse, the same, or can nobody tell yet?

The question is put to *paired* differences, run minus reference, at the same steps of the same data: most of the
step-to-step noise of a training loss comes from the data and cancels. Positive means the run's loss is higher.

An interval alone does not answer: one that contains zero may only be wide. So there is a margin (`MARGIN`, 0.5 % of
the reference's loss: a choice, made before looking at any run), and the words mean, for the 95 % interval:

    worse, better       it excludes zero. A difference smaller than the margin is still a difference, and is called
                        one: "worse (by under 0.5 %)" where the whole interval lies inside the margin.
    same within noise   it contains zero and lies inside the margin (an equivalence test as in Schuirmann, 1987,
                        Journal of Pharmacokinetics and Biopharmaceutics 15, with the stricter 95 % interval).
    cannot tell         everything else: more steps or seeds are needed.

Each interval holds for its own comparison; nothing is corrected for looking at several. A run, here, is anything
with sorted `steps`, `losses` (NaN where not finite), `at(steps)`, `seed` and `settings`, as plot_loss.py reads it.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

MARGIN = 0.005  # of the reference's loss
TAIL = 0.2  # the last part of a run, which a verdict is about
BATCHES = 5
# Below this many steps the correlation cannot be estimated well enough: see the table in `step_half_width`.
MIN_STEPS = 20
# Two-sided 95 % quantiles of Student's t for 1 to 10 degrees of freedom, from any printed table.
STUDENT_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


# What two runs must share to be a comparison, as named in the run record: model, data, work. The configuration is not
# here: it is the experiment. `memory_kind` is, because resident memory and an allocator's bytes cannot be subtracted.
LIKE_FOR_LIKE = (
    "num_layers",
    "hidden_dim",
    "num_heads",
    "vocab_size",
    "parameter_count",
    "use_real_data",
    "dataset",
    "tokenizer",
    "seq_length",
    "world_size",
    "batch_size",
    "gradient_accumulation_steps",
    "tokens_per_step",
    "num_steps",
    "memory_kind",
)
SAME_ORDER = ("seed", "data_fingerprint")  # differs between the seeds of one label, not within a pair


@dataclass(frozen=True)
class Verdict:
    """What was found for one run against the reference. Losses in nats; `low` and `high` are None without interval."""

    word: str
    difference: float | None = None
    low: float | None = None
    high: float | None = None


def pair_by_seed(references, runs):
    """[(reference, run)]: by seed where every record names one and some are shared, else in the order given."""
    of_seed = {run.seed: run for run in references}
    if None not in of_seed and all(run.seed is not None for run in runs):
        if pairs := [(of_seed[run.seed], run) for run in runs if run.seed in of_seed]:
            return pairs
    return list(zip(references, runs, strict=False))


def differences(one, other, names):
    """[(name, one's, other's)] for those of `names` that both records give, differently."""
    a, b = one.settings, other.settings
    return [(name, a[name], b[name]) for name in names if name in a and name in b and a[name] != b[name]]


def shared_tail(pair):
    """The steps a verdict on this pair is about: the last 20 % of those both have, less losses that are not finite."""
    one, other = pair
    steps = last_part(np.intersect1d(one.steps, other.steps))
    return steps[np.isfinite(one.at(steps) + other.at(steps))]


def last_part(values):
    """The last 20 % of `values`, at least one."""
    return values[-max(1, round(TAIL * len(values))) :]


def judge_curves(pairs) -> Verdict:
    """Verdict on the training loss over the last 20 % of steps, for `pairs` of (reference run, run).

    Of the steps with one pair, of the seeds with several. A run that ends without a finite loss is simply worse.
    """
    if any(np.isnan(one.losses[-1]) for one, _ in pairs):
        return Verdict("cannot tell (the reference's last loss is not finite)")
    if any(np.isnan(other.losses[-1]) for _, other in pairs):
        return Verdict("worse (its last loss is not finite)")
    tails = [[run.at(shared_tail(pair)) for run in pair] for pair in pairs if len(shared_tail(pair))]
    level = float(np.mean([one.mean() for one, _ in tails])) if tails else 0.0
    if len(tails) > 1:
        return judge_seeds(np.array([(other - one).mean() for one, other in tails]), level)
    return judge_steps(tails[0][1] - tails[0][0] if tails else np.array([]), level)


def judge_finals(pairs) -> Verdict | None:
    """Verdict on one number a run, [(reference's, run's)], so an interval needs several seeds. None without numbers."""
    if not pairs or any(None in pair for pair in pairs):
        return None
    return judge_seeds(np.array([other - one for one, other in pairs]), float(np.mean(pairs, axis=0)[0]))


def judge_steps(differences: np.ndarray, reference_loss: float) -> Verdict:
    """Verdict from one pair of runs: `differences` of neighbouring steps, [steps], and the reference's mean loss.

    The interval speaks of the noise of steps. What another seed would have given, one pair of runs cannot say.
    """
    count = len(differences)
    if count == 0:
        return Verdict(too_few(0, "step"))
    difference = float(np.mean(differences))
    if count < MIN_STEPS:
        return Verdict(too_few(count, "step"), difference)
    half = step_half_width(differences)
    return in_words(difference, half, reference_loss, too_few(count, "step"))


def judge_seeds(differences: np.ndarray, reference_loss: float) -> Verdict:
    """Verdict from several seeds: `differences` holds one mean paired difference per seed, [seeds].

    Seeds are independent, so this is the textbook paired Student t interval, and it speaks of all seeds.
    """
    count = len(differences)
    if count == 0:
        return Verdict(too_few(0, "seed"))
    difference = float(np.mean(differences))
    if count == 1:
        return Verdict(too_few(1, "seed"), difference)
    half = student_t(count - 1) * float(np.std(differences, ddof=1)) / math.sqrt(count)
    return in_words(difference, half, reference_loss, too_few(count, "seed"))


def in_words(difference: float, half: float, reference_loss: float, otherwise: str) -> Verdict:
    """The word for the interval `difference` +- `half` (see the top of this file); `otherwise` when it has none."""
    low, high = difference - half, difference + half
    margin = MARGIN * abs(reference_loss)
    inside = -margin <= low and high <= margin
    if low > 0 or high < 0:
        word = "worse" if low > 0 else "better"
        word += f" (by under {MARGIN:.1%})".replace("%", " %") if inside else ""
    else:
        word = "same within noise" if inside else otherwise
    return Verdict(word, difference, low, high)


def too_few(count: int, unit: str) -> str:
    return f"cannot tell ({count} {unit} is too few)" if count == 1 else f"cannot tell ({count} {unit}s are too few)"


def step_half_width(differences: np.ndarray) -> float:
    """Half the width of a 95 % interval for the mean of a correlated series, [steps], by batch means.

    The series is cut into 5 batches; their means vary like nearly independent draws, and Student's t with 4 degrees
    of freedom pays for there being only 5 (Schmeiser, 1982, Operations Research 30(3)). Batches that are short
    beside the correlation still vary together, which hides part of the variance; as in ASAP3 (Steiger et al., 2005,
    ACM TOMACS 15(1)) the missing part is put back by a factor from a fitted AR(1) process.

    Share of 3000 simulated AR(1) series whose interval held the true mean, in percent, by correlation (the tests
    repeat this with 500):

        steps     0    0.5   0.7   0.9   0.95
          20    95.7  94.8  93.9  88.1  82.3
          60    94.9  95.3  94.8  94.0  89.8
         200    94.6  95.0  95.6  95.6  95.2
        1000    95.0  95.6  94.7  95.6  95.2
    """
    size = len(differences)
    means = np.array([batch.mean() for batch in np.array_split(differences, BATCHES)])
    variance = float(np.var(means, ddof=1)) / BATCHES
    correlation = cautious_correlation(differences)
    truth = variance_of_mean(correlation, size)
    # What `variance` is on average: the spread of the batch means about a grand mean that moves with them.
    seen = (variance_of_mean(correlation, size / BATCHES) - truth) / (BATCHES - 1)
    return student_t(BATCHES - 1) * math.sqrt(variance * max(1.0, truth / seen))


def cautious_correlation(series: np.ndarray) -> float:
    """Correlation of neighbours in `series`, [steps], between 0 and 0.99: the estimate plus one standard error.

    Its downward bias, about (1 + 3 rho) / n (Kendall, 1954, Biometrika 41), is taken out first. The standard error
    goes on top because the mistakes are not symmetric: too low a correlation hides variance, too high a one adds
    little unless it is near 1.
    """
    centred = series - series.mean()
    power = float(centred @ centred)
    if power == 0:
        return 0.0
    estimate = float(centred[1:] @ centred[:-1]) / power
    estimate = min(estimate + (1 + 3 * estimate) / len(series), 1.0)
    return min(max(estimate + math.sqrt((1 - estimate**2) / len(series)), 0.0), 0.99)


def variance_of_mean(rho: float, size: float) -> float:
    """Variance of the mean of `size` neighbours of an AR(1) process with variance 1 and correlation `rho`."""
    return ((1 + rho) / (1 - rho) - 2 * rho * (1 - rho**size) / (size * (1 - rho) ** 2)) / size


def student_t(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t: a table, then Abramowitz & Stegun 26.7.5 (good to 0.0002 from 11 on)."""
    if freedom <= len(STUDENT_T):
        return STUDENT_T[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
