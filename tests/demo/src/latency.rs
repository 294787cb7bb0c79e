//! The verdict on latencies: on those 99th percentiles that the report prints.

use super::calm::CALM_US;
use super::table::millis;

/// A 99th percentile of the report, and how late a sleeping thread woke up meanwhile, microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct P99 {
    /// As it is printed.
    pub us: u64,
    /// What of it is no chance: it is taken over few values.
    pub at_least_us: u64,
    /// Lateness of the machine itself, 99th percentile.
    pub late_us: u64,
}

/// What is compared.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Latencies {
    /// `chat`'s, alone and beside others.
    pub neighbour: Option<[P99; 2]>,
    /// The answer's steps, with Tessera and without.
    pub steps: Option<[P99; 2]>,
}

/// What is to be said of latencies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    /// They are as promised: a clause for the report.
    Kept(String),
    /// They are not: what was not, a sentence each.
    Broken(Vec<String>),
    /// Nothing can be said, and why.
    Open(String),
}

/// Beyond twice its own latency, what a neighbour may cost, microseconds: it takes no GPU time, but CPU.
const NEIGHBOUR_US: u64 = 5000;

/// Judges what is printed. Where it would fail only by what so few values leave to chance, it is open. Latencies of a machine whose own CPUs were late are open: nothing fails because a
/// machine is busy. A real GPU is reported, not judged: its other users are not known.
pub(super) fn judge(latencies: &Latencies, real: bool) -> Judgement {
    let pairs = [latencies.neighbour, latencies.steps];
    let late = pairs.iter().flatten().flatten().map(|one| one.late_us).max();
    if real {
        return Judgement::Open("on a real GPU latencies are reported and not judged".into());
    }
    if let Some(late) = late.filter(|late| *late > CALM_US) {
        return Judgement::Open(format!(
            "latencies and GPU time are not judged: this machine's CPUs were busy (of threads that slept for 1 ms, one in a \
             hundred woke up {} late)",
            millis(late)
        ));
    }
    let (mut broken, mut chance) = (Vec::new(), None);
    let mut kept = String::from("chat's p99 is no more than twice its own, and 5 ms");
    if let Some([alone, beside]) = latencies.neighbour
        && beside.us > 2 * alone.us + NEIGHBOUR_US
    {
        let both = format!(
            "chat's p99 was {} beside greedy and crash, and {} alone",
            millis(beside.us),
            millis(alone.us)
        );
        match beside.at_least_us > 2 * alone.us + NEIGHBOUR_US {
            true => broken.push(format!("{both}: its neighbours harmed it")),
            false => chance = Some(both),
        }
    }
    if let Some([with, without]) = latencies.steps {
        kept += &format!(
            "; a step of the answer took {} with Tessera and {} without (p99)",
            millis(with.us),
            millis(without.us)
        );
        if with.us > without.us {
            let both = format!(
                "the p99 of the answer's steps was {} with Tessera, and {} without",
                millis(with.us),
                millis(without.us)
            );
            match with.at_least_us > without.us {
                true => broken.push(format!("{both}: its share did not help it")),
                false => chance = Some(both),
            }
        }
    }
    match chance {
        _ if !broken.is_empty() => Judgement::Broken(broken),
        Some(both) => Judgement::Open(format!(
            "latencies are not judged: {both}, a difference that so few requests may show by chance; run it longer \
             (`--seconds`)"
        )),
        None => Judgement::Kept(kept),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(a: u64, b: u64, late_us: u64) -> Option<[P99; 2]> {
        Some([a, b].map(|us| P99 { us, at_least_us: us - us / 10, late_us }))
    }

    #[test]
    fn a_p99_that_is_worse_with_tessera_than_without_fails() {
        // What the demo once printed, and called OK.
        let latencies = Latencies { steps: pair(38_500, 27_000, 100), ..Latencies::default() };
        let Judgement::Broken(why) = judge(&latencies, false) else { panic!("it passed") };
        assert!(why[0].contains("38.5 ms") && why[0].contains("27.0 ms"), "{why:?}");
        let latencies = Latencies { steps: pair(9_000, 27_000, 100), ..Latencies::default() };
        let Judgement::Kept(how) = judge(&latencies, false) else { panic!("it failed") };
        assert!(how.contains("9.00 ms with Tessera and 27.0 ms without"), "{how}");
    }

    #[test]
    fn a_neighbour_whose_p99_grew_was_harmed() {
        let harmed = Latencies { neighbour: pair(7_000, 43_000, 100), ..Latencies::default() };
        assert!(matches!(judge(&harmed, false), Judgement::Broken(_)));
        let fine = Latencies { neighbour: pair(7_000, 12_000, 100), ..Latencies::default() };
        assert!(matches!(judge(&fine, false), Judgement::Kept(_)));
    }

    #[test]
    fn what_may_be_chance_is_not_judged() {
        let latencies = Latencies { steps: pair(28_000, 27_000, 100), ..Latencies::default() };
        let Judgement::Open(why) = judge(&latencies, false) else { panic!("it was judged") };
        assert!(why.contains("28.0 ms with") && why.contains("--seconds"), "{why}");
        let both = Latencies { neighbour: pair(7_000, 43_000, 100), ..latencies };
        assert!(matches!(judge(&both, false), Judgement::Broken(why) if why.len() == 1));
    }

    #[test]
    fn nothing_fails_because_the_machine_is_busy() {
        let latencies = Latencies { neighbour: pair(1, 1, 0), steps: pair(38_500, 27_000, 9_000) };
        let Judgement::Open(why) = judge(&latencies, false) else { panic!("it was judged") };
        assert!(why.contains("9.00 ms late"), "{why}");
        let latencies = Latencies { steps: pair(38_500, 27_000, 0), ..Latencies::default() };
        assert!(matches!(judge(&latencies, true), Judgement::Open(_)), "a real GPU");
    }
}
