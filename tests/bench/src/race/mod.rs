//! Sixteen processes of four threads race for memory at their tenant's limit, by every API that
//! Tessera accounts for; some are killed.
//!
//! Every request is for a chunk of 32 MiB: whole pages for what is charged by its footprint, and
//! just one of the chunks in which pools reserve (`docs/internals/shim.md`, "Memory"). A thread has at most
//! one, held or on its way back, so what fits is known in advance whatever the APIs are.
//!
//! - **Contended rounds.** The limit leaves room for fewer chunks than there are threads. At one
//!   moment every thread asks for one: by the same API, or each by another. Exactly as many as fit
//!   must be granted: one more is an overshoot, one less a false refusal, and what NVML shows while
//!   all hold is judged as well. In every tenth round processes are killed while they ask; of those
//!   only the account is judged.
//! - **Room for all.** The limit leaves room for exactly as many chunks as there are threads, which
//!   take and give back as fast as they can, each time by another API, while processes are killed
//!   and replaced. Every request fits by construction, so every refusal is a false one, and at no
//!   moment does the driver's account exceed the limit.

mod team;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use strum::VariantArray;
use tessera_harness::{Rng, monotonic_ns};
use tessera_tenant_program::memory::Api;

use crate::report::Report;
use crate::world::{Account, CONTEXT, World};
use team::Team;

/// Racing processes.
pub const PROCESSES: usize = 16;
pub const THREADS: usize = 4;
/// What every request is for.
pub const CHUNK: u64 = 32 << 20;
/// Chunks that fit in the contended rounds.
const FIT: u64 = 40;
/// Contended rounds by each API, and as many where every thread uses another.
const ROUNDS: usize = 40;
/// Every this many rounds, processes are killed in the middle.
const KILL_EVERY: usize = 10;
/// Processes killed in such a round, or in each stretch of churning.
const VICTIMS: usize = 2;
/// Stretches of churning with room for all, and their length.
const CHURNS: usize = 8;
const CHURN_MS: u64 = 500;
/// Time for an order to reach all processes before a round starts.
const MUSTER: Duration = Duration::from_millis(4);
/// The name of rounds by all APIs at once.
const MIXED: &str = "mixed";

/// What some of the races showed.
#[derive(Clone, Debug, Default)]
struct Tally {
    /// Most bytes held beyond the limit at any judged moment.
    overshoot_bytes: u64,
    /// Requests that fitted and were refused.
    false_refusals: u64,
    /// Requests that were rightly refused.
    true_refusals: u64,
    /// Contended rounds whose grants were counted.
    rounds: u64,
    kills: u64,
}

/// What the races showed, by the API that was asked.
#[derive(Clone, Debug, Default)]
struct Outcome(BTreeMap<&'static str, Tally>);

impl Outcome {
    /// The worst over all APIs.
    fn overshoot_bytes(&self) -> u64 {
        self.0.values().map(|tally| tally.overshoot_bytes).max().unwrap_or(0)
    }

    fn false_refusals(&self) -> u64 {
        self.0.values().map(|tally| tally.false_refusals).sum()
    }

    fn detail(&self) -> Value {
        let by_api: BTreeMap<&str, Value> = self
            .0
            .iter()
            .map(|(name, tally)| {
                let detail = json!({
                    "overshoot_bytes": tally.overshoot_bytes,
                    "false_refusals": tally.false_refusals,
                    "true_refusals": tally.true_refusals,
                    "counted_rounds": tally.rounds,
                    "killed": tally.kills,
                });
                (*name, detail)
            })
            .collect();
        json!({ "processes": PROCESSES, "threads": THREADS, "chunk_bytes": CHUNK, "apis": by_api })
    }
}

/// Runs both races.
#[allow(clippy::cast_precision_loss, reason = "counts and bytes far below 2^53")]
pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let mut outcome = Outcome::default();
    let account = Account::open()?;
    for api in Api::VARIANTS.iter().copied() {
        let tally = outcome.0.entry(api.into_str()).or_default();
        contended(world, &account, &[api], tally)?;
    }
    let tally = outcome.0.entry(MIXED).or_default();
    contended(world, &account, Api::VARIANTS, tally)?;
    room_for_all(world, &account, Api::VARIANTS, tally)?;
    let over = outcome.overshoot_bytes() as f64;
    report.figure("overshoot_bytes", "granted over the limit", "bytes", over, 0.0);
    let refusals = outcome.false_refusals() as f64;
    report.figure("false_refusals", "refusals of what fits", "", refusals, 0.0);
    report.put("race_detail", outcome.detail());
    Ok(())
}

const CONTEXTS: u64 = PROCESSES as u64 * CONTEXT;

/// The APIs' names, from another one on for each place, as orders have them.
fn list(apis: &[Api], place: usize) -> String {
    let mut names: Vec<&str> = apis.iter().map(|api| api.into_str()).collect();
    names.rotate_left(place % apis.len());
    names.join(",")
}

fn contended(
    world: &World,
    account: &Account,
    apis: &[Api],
    tally: &mut Tally,
) -> anyhow::Result<()> {
    let limit = CONTEXTS + FIT * CHUNK;
    let pages = world.pages(limit);
    let mut team = Team::start(world, &pages)?;
    let mut rng = Rng::with_seed(1);
    for round in 0..ROUNDS {
        let kill = round % KILL_EVERY == KILL_EVERY - 1;
        let at = monotonic_ns() + u64::try_from(MUSTER.as_nanos())?;
        team.order(|place| format!("round {at} {}", list(apis, place + round)))?;
        if kill {
            std::thread::sleep(MUSTER + Duration::from_micros(rng.u64(..1500)));
            for _ in 0..VICTIMS {
                let place = rng.usize(..PROCESSES);
                tally.kills += u64::from(team.kill(place));
            }
        }
        let granted: u64 = team.answers()?.into_iter().sum();
        judge_account(account, limit, tally)?;
        if !kill {
            tally.rounds += 1;
            let bytes = granted.saturating_sub(FIT) * CHUNK;
            tally.overshoot_bytes = tally.overshoot_bytes.max(bytes);
            tally.false_refusals += FIT.saturating_sub(granted);
            tally.true_refusals += (PROCESSES * THREADS) as u64 - granted;
        }
        team.order(|_| "free".into())?;
        team.answers()?;
        team.refill()?;
    }
    team.end()
}

/// While everyone holds what it got and nothing moves, the account is exact.
fn judge_account(account: &Account, limit: u64, tally: &mut Tally) -> anyhow::Result<()> {
    let held: u64 = account.processes()?.iter().map(|(_, bytes)| bytes).sum();
    tally.overshoot_bytes = tally.overshoot_bytes.max(held.saturating_sub(limit));
    Ok(())
}

fn room_for_all(
    world: &World,
    account: &Account,
    apis: &[Api],
    tally: &mut Tally,
) -> anyhow::Result<()> {
    let limit = CONTEXTS + (PROCESSES * THREADS) as u64 * CHUNK;
    let pages = world.pages(limit);
    let mut team = Team::start(world, &pages)?;
    let mut rng = Rng::with_seed(2);
    for _ in 0..CHURNS {
        team.order(|place| format!("churn {CHURN_MS} {}", list(apis, place)))?;
        for _ in 0..VICTIMS {
            let pause = Duration::from_millis(50 + rng.u64(..CHURN_MS / 4));
            watch(account, limit, tally, pause)?;
            tally.kills += u64::from(team.kill(rng.usize(..PROCESSES)));
            // In the middle of the others' churning, with the dead one's bytes just returned.
            team.refill()?;
        }
        tally.false_refusals += team.answers()?.into_iter().sum::<u64>();
    }
    team.end()
}

/// Judges the driver's account, again and again for `time`, while everybody takes and gives back.
fn watch(account: &Account, limit: u64, tally: &mut Tally, time: Duration) -> anyhow::Result<()> {
    let end = Instant::now() + time;
    while Instant::now() < end {
        let used = account.used()?;
        tally.overshoot_bytes = tally.overshoot_bytes.max(used.saturating_sub(limit));
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
