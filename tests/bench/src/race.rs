//! Sixteen processes of four threads race for memory at their tenant's limit; some are killed.
//!
//! - **Contended rounds.** The limit leaves room for fewer chunks than there are threads. At one
//!   moment every thread asks for one. Exactly as many as fit must be granted: one more is an
//!   overshoot, one less a false refusal, and what NVML shows while all hold is judged as well. In
//!   every tenth round processes are killed while they ask; of those only the account is judged.
//! - **Room for all.** The limit leaves room for exactly as many chunks as there are threads, which
//!   take and give back as fast as they can while processes are killed and replaced. Every request
//!   fits by construction, so every refusal is a false one.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use anyhow::Context;
use tessera_tenant::rng::Rng;

use crate::child::CHUNK;
use crate::clock;
use crate::world::{Account, CONTEXT, Pages, World};

/// Racing processes.
pub const PROCESSES: usize = 16;
/// Threads of each.
pub const THREADS: usize = 4;
/// Chunks that fit in the contended rounds.
const FIT: u64 = 40;
/// Contended rounds.
const ROUNDS: usize = 400;
/// Every this many rounds, processes are killed in the middle.
const KILL_EVERY: usize = 10;
/// Processes killed in such a round, or in each stretch of churning.
const VICTIMS: usize = 2;
/// Stretches of churning with room for all, and their length.
const CHURNS: usize = 8;
const CHURN_MS: u64 = 500;
/// Time for an order to reach all processes before a round starts.
const MUSTER: Duration = Duration::from_millis(4);

/// What the races showed.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Most bytes held beyond the limit at any judged moment.
    pub overshoot_bytes: u64,
    /// Requests that fitted and were refused.
    pub false_refusals: u64,
    /// Requests that were rightly refused.
    pub true_refusals: u64,
    /// Contended rounds whose grants were counted.
    pub rounds: u64,
    /// Processes killed.
    pub kills: u64,
}

/// Runs both races.
///
/// # Errors
/// A process that fails otherwise than by being refused.
pub fn run(world: &World) -> anyhow::Result<Outcome> {
    let mut outcome = Outcome::default();
    let account = Account::open(world)?;
    contended(world, &account, &mut outcome)?;
    room_for_all(world, &account, &mut outcome)?;
    Ok(outcome)
}

const CONTEXTS: u64 = PROCESSES as u64 * CONTEXT;

fn contended(world: &World, account: &Account, outcome: &mut Outcome) -> anyhow::Result<()> {
    let limit = CONTEXTS + FIT * CHUNK;
    let pages = world.pages(limit)?;
    let mut team = Team::start(world, &pages)?;
    let mut rng = Rng::new(1);
    for round in 0..ROUNDS {
        let kill = round % KILL_EVERY == KILL_EVERY - 1;
        let at = clock::now_ns() + u64::try_from(MUSTER.as_nanos())?;
        team.order(&format!("round {at}"))?;
        if kill {
            std::thread::sleep(MUSTER + Duration::from_micros(rng.below(1500)));
            for _ in 0..VICTIMS {
                team.kill(usize::try_from(rng.below(PROCESSES as u64))?, outcome);
            }
        }
        let granted: u64 = team.answers()?.into_iter().sum();
        judge_account(account, limit, outcome)?;
        if !kill {
            outcome.rounds += 1;
            let bytes = granted.saturating_sub(FIT) * CHUNK;
            outcome.overshoot_bytes = outcome.overshoot_bytes.max(bytes);
            outcome.false_refusals += FIT.saturating_sub(granted);
            outcome.true_refusals += (PROCESSES * THREADS) as u64 - granted;
        }
        team.order("free")?;
        team.answers()?;
        team.refill()?;
    }
    team.end()
}

/// While everyone holds what it got and nothing moves, the account is exact.
fn judge_account(account: &Account, limit: u64, outcome: &mut Outcome) -> anyhow::Result<()> {
    let held: u64 = account.processes()?.iter().map(|(_, bytes)| bytes).sum();
    outcome.overshoot_bytes = outcome.overshoot_bytes.max(held.saturating_sub(limit));
    Ok(())
}

fn room_for_all(world: &World, account: &Account, outcome: &mut Outcome) -> anyhow::Result<()> {
    let limit = CONTEXTS + (PROCESSES * THREADS) as u64 * CHUNK;
    let pages = world.pages(limit)?;
    let mut team = Team::start(world, &pages)?;
    let mut rng = Rng::new(2);
    for _ in 0..CHURNS {
        team.order(&format!("churn {CHURN_MS}"))?;
        for _ in 0..VICTIMS {
            std::thread::sleep(Duration::from_millis(50 + rng.below(CHURN_MS / 4)));
            team.kill(usize::try_from(rng.below(PROCESSES as u64))?, outcome);
            // In the middle of the others' churning, with the dead one's bytes just returned.
            team.refill()?;
        }
        let used = account.used()?;
        outcome.overshoot_bytes = outcome.overshoot_bytes.max(used.saturating_sub(limit));
        outcome.false_refusals += team.answers()?.into_iter().sum::<u64>();
    }
    team.end()
}

struct Member {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Member {
    fn start(world: &World, pages: &Pages) -> anyhow::Result<Self> {
        let mut command = world.hooked(&["race", &THREADS.to_string()], pages)?;
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(world.log()?).spawn()?;
        let orders = child.stdin.take().context("piped")?;
        let answers = BufReader::new(child.stdout.take().context("piped")?);
        Ok(Self { child, orders, answers })
    }

    fn answer(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        if line.is_empty() {
            let status = self.child.wait()?;
            anyhow::bail!("a racing process ended: {status}");
        }
        Ok(line.trim().to_owned())
    }
}

/// The racing processes; a killed one leaves its place empty until [`Team::refill`].
struct Team<'a> {
    world: &'a World,
    pages: &'a Pages,
    members: Vec<Option<Member>>,
    /// Those that joined after the order that the others are to answer.
    late: Vec<usize>,
}

impl<'a> Team<'a> {
    fn start(world: &'a World, pages: &'a Pages) -> anyhow::Result<Self> {
        let members = (0..PROCESSES).map(|_| None).collect();
        let mut team = Self { world, pages, members, late: Vec::new() };
        team.refill()?;
        team.late.clear();
        Ok(team)
    }

    /// Fills empty places; a process that cannot open its context, which fits, fails the race.
    fn refill(&mut self) -> anyhow::Result<()> {
        for place in 0..self.members.len() {
            if self.members[place].is_none() {
                let mut member = Member::start(self.world, self.pages)?;
                anyhow::ensure!(member.answer()? == "ready", "a racing process did not start");
                self.members[place] = Some(member);
                self.late.push(place);
            }
        }
        Ok(())
    }

    fn order(&mut self, order: &str) -> anyhow::Result<()> {
        self.late.clear();
        for member in self.members.iter_mut().flatten() {
            writeln!(member.orders, "{order}")?;
        }
        Ok(())
    }

    /// The answers of all that were given the order and live.
    fn answers(&mut self) -> anyhow::Result<Vec<u64>> {
        let late = std::mem::take(&mut self.late);
        let members = self.members.iter_mut().enumerate();
        let asked = members.filter(|(place, _)| !late.contains(place));
        asked.filter_map(|(_, m)| m.as_mut()).map(|m| Ok(m.answer()?.parse()?)).collect()
    }

    fn kill(&mut self, place: usize, outcome: &mut Outcome) {
        if let Some(mut member) = self.members[place].take() {
            // Gone when this returns: its address space, and with it its slot's lock, is released.
            let _ = member.child.kill();
            let _ = member.child.wait();
            outcome.kills += 1;
        }
    }

    fn end(mut self) -> anyhow::Result<()> {
        for member in self.members.iter_mut().filter_map(Option::take) {
            drop(member.orders);
            let mut child = member.child;
            let status = child.wait()?;
            anyhow::ensure!(status.success(), "a racing process ended: {status}");
        }
        Ok(())
    }
}

impl Drop for Team<'_> {
    fn drop(&mut self) {
        for member in self.members.iter_mut().flatten() {
            let _ = member.child.kill();
            let _ = member.child.wait();
        }
    }
}
