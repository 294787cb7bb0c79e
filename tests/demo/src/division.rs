//! The second part: one GPU's time, shared by one who computes an answer step by step and one who
//! launches without end from several processes; alone, with Tessera, and without.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::calm::CALM_US;
use super::latency::P99;
use super::play::Play;
use super::table::{Table, count, millis};
use super::tenant::{BATCH_PROCESSES, Part, Tenant};

/// One way of running the load.
#[derive(Clone, Debug, Default)]
pub(super) struct Division {
    /// Which.
    pub name: &'static str,
    /// Percent of the GPU that the answer, and the batch, asked for; nobody is asked without Tessera.
    pub asked: [Option<u32>; 2],
    /// Percent of the last second that they kept the GPU busy, by the driver's account.
    pub got: [u32; 2],
    /// Steps of the answer.
    pub steps: u64,
    /// Median of a step, microseconds.
    pub p50_us: u64,
    /// 99th percentile, microseconds.
    pub p99_us: u64,
    /// What of it is no chance of so few steps, microseconds.
    pub p99_at_least_us: u64,
    /// How late this machine's CPUs were meanwhile, microseconds.
    pub late_us: u64,
}

/// Names of the rows.
const ALONE: &str = "answer alone";
const WITH: &str = "with Tessera";
const WITHOUT: &str = "without Tessera";
/// Part of the time of the first part that each way takes, and the least: the driver's account is an
/// average over a second.
const PART: f64 = 0.2;
const LEAST: Duration = Duration::from_millis(1800);
/// Before what is counted: programs start.
const WARM_UP: Duration = Duration::from_millis(300);
/// What starting and ending programs takes besides, each way.
const CHANGE: Duration = Duration::from_millis(300);

/// How long each of the three ways takes after a first part of so long.
pub(super) fn planned(first: Duration) -> [Duration; 3] {
    [WARM_UP + measured(first) + CHANGE; 3]
}

fn measured(first: Duration) -> Duration {
    first.mul_f64(PART).max(LEAST)
}

impl Play {
    /// Runs the load three ways.
    ///
    /// # Errors
    /// A tenant that does not start.
    pub(super) async fn divide(&mut self) -> anyhow::Result<()> {
        if self.stage.replicas_per_gpu < 2 {
            return Ok(());
        }
        let answer = self.place(Part::Answer).await?;
        self.ready(answer, 1).await?;
        self.tenants[answer].state = "computes steps of an answer, alone".into();
        self.measure(ALONE).await?;

        let batch = self.place(Part::Batch).await?;
        self.tenants[batch].state =
            format!("launches without end from {BATCH_PROCESSES} processes");
        self.ready(batch, usize::try_from(BATCH_PROCESSES)?).await?;
        self.tenants[answer].state = "computes beside it, at its share".into();
        self.measure(WITH).await?;

        let gpu = self.tenants[answer].gpu;
        for mut tenant in self.tenants.drain(..) {
            tenant.remove(&self.stage);
            tenant.kill().await;
        }
        self.watch.seen().forget();
        self.tell("the same two programs, without Tessera".into());
        for (index, part) in [Part::Answer, Part::Batch].into_iter().enumerate() {
            let mut tenant = Tenant::bare(part, gpu);
            let group = tenant.start(self.means, &self.program, &self.stage)?;
            self.watch.seen().enrol(group, index);
            self.tenants.push(tenant);
        }
        self.ready(0, 1).await?;
        self.ready(1, usize::try_from(BATCH_PROCESSES)?).await?;
        self.measure(WITHOUT).await?;
        for mut tenant in self.tenants.drain(..) {
            tenant.kill().await;
        }
        Ok(())
    }

    /// Lets it run for a while, and takes down what the answer says of its steps and the driver of both.
    async fn measure(&mut self, name: &'static str) -> anyhow::Result<()> {
        self.pass(Instant::now() + WARM_UP).await;
        let phases = self.close_phase().await?;
        self.calm.take();
        self.pass(Instant::now() + measured(self.first)).await;
        let late_us = self.calm.take();
        let got = {
            let seen = self.watch.seen();
            [0, 1].map(|tenant| seen.busy.get(tenant).copied().unwrap_or(0))
        };
        self.close_phase().await?;
        let served = self.tenants[0].progress().phases.get(phases).cloned().unwrap_or_default();
        let asked = [0, 1].map(|tenant| self.tenants.get(tenant).and_then(Tenant::asked_percent));
        self.division.push(Division {
            name,
            asked,
            got,
            steps: served.requests,
            p50_us: served.p50_us,
            p99_us: served.p99_us,
            p99_at_least_us: served.p99_at_least_us,
            late_us,
        });
        self.part_is_over();
        Ok(())
    }

    /// Ends a phase of the answer's; how many it has closed.
    async fn close_phase(&mut self) -> anyhow::Result<usize> {
        let before = self.tenants[0].progress().phases.len();
        self.tenants[0].signal(Signal::SIGUSR1);
        self.wait("the answer did not close its phase", |play| {
            play.tenants[0].progress().phases.len() > before
        })
        .await?;
        Ok(before + 1)
    }
}

/// Side by side.
pub(super) fn table(ways: &[Division]) -> Table {
    let mut table = Table::new(&[
        "GPU TIME",
        "answer ASKED",
        "GOT",
        "batch ASKED",
        "GOT",
        "STEPS",
        "p50",
        "p99",
    ]);
    let percent = |percent: u32| format!("{percent} %");
    for way in ways {
        let asked = |tenant: usize| way.asked[tenant].map_or_else(|| "-".into(), percent);
        table.row(vec![
            way.name.to_owned(),
            asked(0),
            percent(way.got[0]),
            asked(1),
            percent(way.got[1]),
            count(way.steps),
            millis(way.p50_us),
            millis(way.p99_us),
        ]);
    }
    table
}

/// More than noise, percentage points.
const CLEARLY: u32 = 10;

/// What was not as promised: the answer's share is clearly larger with Tessera than without. On a machine whose CPUs
/// are busy that is not judged: the answer's steps come late, and its neighbour takes what it leaves. A real GPU is
/// reported, not judged: its driver's samples are not exact.
pub(super) fn failures(ways: &[Division], real: bool) -> Vec<String> {
    let got = |name: &str| ways.iter().find(|way| way.name == name).map(|way| way.got[0]);
    if real || ways.iter().any(|way| way.late_us > CALM_US) {
        return Vec::new();
    }
    match (got(WITH), got(WITHOUT)) {
        (Some(with), Some(without)) if with < without + CLEARLY => vec![format!(
            "answer got {with} % of the GPU with Tessera, and {without} % without: its share did \
             not help it"
        )],
        _ => Vec::new(),
    }
}

/// The 99th percentiles that are printed of the answer's steps, with Tessera and without.
pub(super) fn steps(ways: &[Division]) -> Option<[P99; 2]> {
    let of = |name: &str| {
        let way = ways.iter().find(|way| way.name == name)?;
        Some(P99 { us: way.p99_us, at_least_us: way.p99_at_least_us, late_us: way.late_us })
    };
    Some([of(WITH)?, of(WITHOUT)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ways(with: u32, without: u32) -> Vec<Division> {
        let way = |name, got| Division { name, got: [got, 100 - got], ..Division::default() };
        vec![way(ALONE, 99), way(WITH, with), way(WITHOUT, without)]
    }

    #[test]
    fn a_share_that_does_not_help_fails_it() {
        assert!(failures(&ways(74, 25), false).is_empty());
        assert_eq!(failures(&ways(26, 25), false).len(), 1);
        assert!(failures(&ways(26, 25), true).is_empty(), "a real GPU is not judged");
        let mut busy = ways(26, 25);
        busy[1].late_us = CALM_US + 1;
        assert!(failures(&busy, false).is_empty(), "the CPUs were busy");
        assert!(failures(&[], false).is_empty(), "there was nothing to divide");
    }

    #[test]
    fn what_is_judged_of_steps_is_what_is_printed_of_them() {
        let mut ways = ways(74, 25);
        ways[1].p99_us = 9_120;
        ways[2].p99_us = 27_000;
        let judged = steps(&ways).unwrap().map(|p99| millis(p99.us));
        let lines = table(&ways).lines(120);
        assert!(lines[2].ends_with(&judged[0]), "{lines:#?}");
        assert!(lines[3].ends_with(&judged[1]), "{lines:#?}");
    }

    #[test]
    fn the_three_ways_stand_side_by_side() {
        let lines = table(&ways(74, 25)).lines(120);
        assert_eq!(lines.len(), 4, "{lines:#?}");
        assert!(lines[2].contains("74 %") && lines[3].contains("75 %"), "{lines:#?}");
    }
}
