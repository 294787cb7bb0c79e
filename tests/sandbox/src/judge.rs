//! The demo's verdict: whether Tessera kept its promises, by what the driver and the tenants say. Pure, but for the
//! reading of logs.
//!
//! Device memory and GPU time by the driver's own account: NVML, asked by a process that no shim is loaded into. The
//! shim's pages have no say here.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::unistd::{Pid, getpgid};
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tessera_model::quantity::format_bytes;
use tessera_system::locks::lock;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use super::node::Node;

/// How late a sleeping thread may wake, 99th percentile in microseconds, where latencies mean something: a quarter of a
/// step.
const CALM_US: u64 = 1000;
/// What a neighbour may cost beyond twice one's own latency, microseconds: it takes no GPU time, but CPU.
const NEIGHBOUR_US: u64 = 5000;
/// More than noise, percentage points.
const CLEARLY: u32 = 10;

/// Requests that were served in one stretch of time.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Phase {
    pub requests: u64,
    pub p50_us: u64,
    pub p99_us: u64,
    /// What of the 99th percentile is not chance of so few requests.
    pub p99_at_least_us: u64,
    pub out_of_memory: u64,
    pub errors: u64,
    /// Requests that read other data than they wrote.
    pub corrupted: u64,
    pub verified_bytes: u64,
}

/// What a container's processes have said.
#[derive(Clone, Debug, Default)]
pub struct Said {
    /// Processes that were at work.
    pub ready: u64,
    pub phases: Vec<Phase>,
    /// Attempts and refusals by API, over all processes.
    pub apis: BTreeMap<String, (u64, u64)>,
    /// Bytes that they hold, overheads aside.
    pub held: u64,
    /// The last line of how a load goes on.
    pub progress: Value,
}

impl Said {
    /// Of lines of `tessera-tenant` from this byte of the log on; what is not one is passed over.
    pub fn of(log: &Path, begun: u64) -> Self {
        let mut text = Vec::new();
        if let Ok(mut file) = File::open(log) {
            let _ = file.seek(SeekFrom::Start(begun)).and_then(|_| file.read_to_end(&mut text));
        }
        Self::read(&String::from_utf8_lossy(&text))
    }

    fn read(text: &str) -> Self {
        let mut said = Self::default();
        // The last word of each process.
        let (mut held, mut apis) = (BTreeMap::new(), BTreeMap::new());
        for line in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
            let pid = line["pid"].as_u64();
            if let Some(bytes) = line["held"].as_u64() {
                held.insert(pid, bytes);
            }
            if let Some(tried) = line["apis"].as_object() {
                apis.insert(pid, tried.clone());
            }
            match line["event"].as_str() {
                Some("ready" | "full") => said.ready += 1,
                Some("progress") => said.progress = line,
                Some("phase") => said.phases.extend(serde_json::from_value::<Phase>(line).ok()),
                _ => {}
            }
        }
        said.held = held.values().sum();
        for (name, tried) in apis.into_values().flatten() {
            let of = |key: &str| tried[key].as_u64().unwrap_or(0);
            let sum = said.apis.entry(name).or_default();
            *sum = (sum.0 + of("attempts"), sum.1 + of("refused"));
        }
        said
    }

    /// Attempts and refusals in all.
    pub fn tries(&self) -> (u64, u64) {
        self.apis.values().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    /// Sums over all phases.
    pub fn total(&self) -> Phase {
        self.phases.iter().fold(Phase::default(), |sum, one| Phase {
            requests: sum.requests + one.requests,
            out_of_memory: sum.out_of_memory + one.out_of_memory,
            errors: sum.errors + one.errors,
            corrupted: sum.corrupted + one.corrupted,
            ..sum
        })
    }
}

/// What is known of a tenant at its end.
#[derive(Clone, Debug, Default)]
pub struct Tenant {
    pub name: &'static str,
    pub asked: usize,
    /// What it may hold, bytes.
    pub quota: u64,
    /// The quota of one replica, bytes.
    pub one: u64,
    /// The most that the driver showed for it, bytes.
    pub peak: u64,
    /// Exit code; none of one that had to be killed.
    pub exit: Option<i32>,
    pub said: Said,
}

/// One way of running the load of the second part.
#[derive(Clone, Debug, Default)]
pub struct Way {
    pub name: &'static str,
    /// Percent of the GPU that answer and batch asked for.
    pub asked: [Option<u32>; 2],
    /// Percent of the last second that they kept it busy, by the driver's account.
    pub got: [u32; 2],
    pub steps: Phase,
    /// How late this machine's CPUs were meanwhile, microseconds.
    pub late_us: u64,
}

/// Everything that is judged.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    pub tenants: Vec<Tenant>,
    /// How late the CPUs were while `chat` served alone, and beside others, microseconds.
    pub late_us: [u64; 2],
    /// The most that `crash` held before it was killed, bytes.
    pub before: Option<u64>,
    /// From SIGKILL until the driver had its bytes back, microseconds.
    pub freed_us: u64,
    /// From the new start until as much was held again, microseconds.
    pub again_us: u64,
    /// Alone, with Tessera, without it; none where a GPU has one replica.
    pub ways: Vec<Way>,
}

/// What is to be said in the end.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// What was not as promised; the exit status is 1 where there is something.
    pub failures: Vec<String>,
    /// What could not be judged, and why.
    pub open: Vec<String>,
}

impl Verdict {
    /// The last lines of the report.
    pub fn text(&self) -> String {
        let open = self.open.iter().map(|why| format!("not judged: {why}"));
        let failed = self.failures.iter().map(|why| format!("FAILED: {why}"));
        let ok = self.failures.is_empty().then(|| "OK: no quota was exceeded".to_owned());
        open.chain(failed).chain(ok).collect::<Vec<_>>().join("\n")
    }
}

/// Judges. A real GPU's latencies and times are reported and not judged: its driver's samples are not exact, and its
/// other users are not known.
pub fn judge(facts: &Facts, real: bool) -> Verdict {
    let mut verdict = Verdict::default();
    for tenant in &facts.tenants {
        verdict.failures.extend(broken(tenant));
    }
    let late = facts.ways.iter().map(|way| way.late_us).chain(facts.late_us).max().unwrap_or(0);
    if real {
        verdict.open.push("latencies and GPU time of a real GPU".to_owned());
    } else if late > CALM_US {
        verdict.open.push(format!(
            "latencies and GPU time: this machine's CPUs were busy (of threads that slept, one in a hundred woke up \
             {} late)",
            millis(late)
        ));
    } else {
        latencies(facts, &mut verdict);
    }
    verdict
}

/// What a tenant did not get, or got and should not have.
fn broken(tenant: &Tenant) -> Vec<String> {
    let Tenant { name, quota, one, peak, said, .. } = tenant;
    let mut failures = Vec::new();
    let mut fails = |fails: bool, why: String| {
        if fails {
            failures.push(format!("{name} {why}"));
        }
    };
    fails(
        peak > quota,
        format!("exceeded its quota: the driver showed {} bytes more", peak.saturating_sub(*quota)),
    );
    fails(*peak == 0, "never held any memory: it proves nothing".to_owned());
    if *name == "greedy" {
        fails(said.tries().0 == 0, "never tried to exceed its quota".to_owned());
        for (api, (_, refused)) in &said.apis {
            fails(*refused == 0, format!("was never refused by the {api} API"));
        }
    }
    let Phase { out_of_memory, errors, corrupted, .. } = said.total();
    fails(out_of_memory > 0, format!("was harmed: {out_of_memory} requests found no memory"));
    fails(errors > 0, format!("was harmed: {errors} requests failed"));
    fails(corrupted > 0, format!("was harmed: {corrupted} requests read wrong data"));
    fails(
        tenant.asked > 1 && said.held <= *one,
        format!("held {}, which one replica would have given it", format_bytes(said.held)),
    );
    match tenant.exit {
        Some(0) => {}
        Some(code) => fails(true, format!("ended with exit code {code}")),
        None => fails(true, "did not end when it was asked to".to_owned()),
    }
    failures
}

/// Judges 99th percentiles and GPU time. What so few requests may show by chance is left open.
fn latencies(facts: &Facts, verdict: &mut Verdict) {
    let mut compare = |what: &str, phase: &Phase, most: u64, than: u64| {
        let both =
            format!("the p99 of {what} was {} against {}", millis(phase.p99_us), millis(than));
        if phase.p99_us <= most {
        } else if phase.p99_at_least_us > most {
            verdict.failures.push(both);
        } else {
            verdict.open.push(format!("{both}, which may be chance: run it longer (--seconds)"));
        }
    };
    let chat = facts.tenants.iter().find(|tenant| tenant.name == "chat");
    if let Some([alone, beside, ..]) = chat.map(|chat| chat.said.phases.as_slice()) {
        let most = 2 * alone.p99_us + NEIGHBOUR_US;
        compare("chat beside others (alone)", beside, most, alone.p99_us);
    }
    if let [_, with, without] = facts.ways.as_slice() {
        let than = without.steps.p99_us;
        compare("answer's steps with Tessera (without)", &with.steps, than, than);
        if with.got[0] < without.got[0] + CLEARLY {
            verdict.failures.push(format!(
                "answer got {} % of the GPU with Tessera, and {} % without: its share did not help it",
                with.got[0], without.got[0]
            ));
        }
    }
}

/// Microseconds as `0.85 ms`, `12.3 ms`.
pub fn millis(us: u64) -> String {
    match us {
        ..10_000 => format!("{}.{:02} ms", us / 1000, us % 1000 / 10),
        _ => format!("{}.{} ms", us / 1000, us % 1000 / 100),
    }
}

/// Time between two looks.
const INTERVAL: Duration = Duration::from_millis(4);
/// Looks between two at GPU time, which is an average over a second.
const BUSY_EVERY: u32 = 20;

/// A pod's container: the process group that all its processes are in.
pub type Group = i32;

#[derive(Debug, Default, Serialize, Deserialize)]
struct Look {
    /// Bytes in use of each GPU, in the order of `gpus`.
    used: Vec<u64>,
    /// Bytes by process group.
    bytes: BTreeMap<Group, u64>,
    /// Percent of the last second in which a process group kept a GPU busy; not in each look.
    busy: Option<BTreeMap<Group, u32>>,
    /// How much later than asked the look was, microseconds: what a machine whose CPUs are busy does to everybody.
    late_us: u64,
}

/// Looks again and again, and prints each look as a line of JSON, until nobody reads.
pub fn account(library: &Path, gpus: &[String]) -> anyhow::Result<()> {
    let nvml = Nvml::builder().lib_path(library.as_os_str()).init().context("no NVML")?;
    for turn in 0u32.. {
        let begun = Instant::now();
        std::thread::sleep(INTERVAL);
        let late = begun.elapsed().saturating_sub(INTERVAL);
        let mut look = Look { late_us: micros(late), ..Look::default() };
        let mut busy = BTreeMap::new();
        for uuid in gpus {
            let device = nvml.device_by_uuid(uuid.as_str())?;
            look.used.push(device.memory_info()?.used);
            for process in device.running_compute_processes()? {
                let UsedGpuMemory::Used(bytes) = process.used_gpu_memory else {
                    anyhow::bail!("NVML does not tell the memory of processes here");
                };
                // One that has ended since holds what the driver is tearing down.
                let Some(group) = group_of(process.pid) else { continue };
                *look.bytes.entry(group).or_default() += bytes;
            }
            // A driver that does not tell says that nothing was busy.
            for sample in device.process_utilization_stats(None).unwrap_or_default() {
                if let Some(group) = group_of(sample.pid) {
                    *busy.entry(group).or_default() += sample.sm_util;
                }
            }
        }
        look.busy = turn.is_multiple_of(BUSY_EVERY).then_some(busy);
        let line = format!("{}\n", serde_json::to_string(&look)?);
        if std::io::stdout().write_all(line.as_bytes()).is_err() {
            break;
        }
    }
    Ok(())
}

fn group_of(pid: u32) -> Option<Group> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?);
    getpgid(Some(pid)).ok().map(Pid::as_raw)
}

/// A duration in microseconds.
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// What the looks have shown so far.
#[derive(Debug, Default)]
pub struct Seen {
    /// Bytes in use of each GPU.
    pub used: Vec<u64>,
    /// Percent of the last second in which a process group kept a GPU busy.
    pub busy: BTreeMap<Group, u32>,
    now: BTreeMap<Group, u64>,
    peaks: BTreeMap<Group, u64>,
    late_us: Vec<u64>,
}

impl Seen {
    fn take(&mut self, look: Look) {
        for (group, bytes) in &look.bytes {
            // One look lists processes one after the other, and could count bytes twice that moved from one to the
            // next: two looks in a row must agree.
            let sure = (*bytes).min(self.now.get(group).copied().unwrap_or(0));
            let peak = self.peaks.entry(*group).or_default();
            *peak = (*peak).max(sure);
        }
        (self.used, self.now) = (look.used, look.bytes);
        self.late_us.push(look.late_us);
        if let Some(busy) = look.busy {
            self.busy = busy;
        }
    }

    /// The most that a process group ever held, bytes.
    pub fn peak(&self, group: Group) -> u64 {
        self.peaks.get(&group).copied().unwrap_or(0)
    }

    /// The 99th percentile of how late a look was since the last call, microseconds.
    pub fn late_us(&mut self) -> u64 {
        let mut all = std::mem::take(&mut self.late_us);
        all.sort_unstable();
        let rank = (all.len() * 99).div_ceil(100);
        rank.checked_sub(1).and_then(|at| all.get(at)).copied().unwrap_or(0)
    }
}

/// An account that is kept until this is dropped.
#[derive(Debug)]
pub struct Account {
    seen: Arc<Mutex<Seen>>,
    child: Child,
}

impl Account {
    pub fn of(node: &Node, library: &Path, gpus: &[String]) -> anyhow::Result<Self> {
        let mut command = node.command(&["in-sandbox", "account"])?;
        command.arg(library).args(gpus).stdout(Stdio::piped());
        let mut child = Command::from(command).kill_on_drop(true).spawn()?;
        let out = child.stdout.take().context("an account without output")?;
        let seen: Arc<Mutex<Seen>> = Arc::default();
        let taken = Arc::clone(&seen);
        tokio::spawn(async move {
            let mut lines = BufReader::new(out).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                if let Ok(look) = serde_json::from_str(&line) {
                    lock(&taken).take(look);
                }
            }
        });
        Ok(Self { seen, child })
    }

    pub fn seen(&mut self) -> anyhow::Result<MutexGuard<'_, Seen>> {
        let ended = self.child.try_wait()?;
        anyhow::ensure!(ended.is_none(), "nothing can be judged here: NVML does not answer");
        Ok(lock(&self.seen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phase(p99_us: u64) -> Phase {
        Phase { requests: 10, p99_us, p99_at_least_us: p99_us - p99_us / 10, ..Phase::default() }
    }

    fn kept() -> Facts {
        let tenant = |name, asked, phases| Tenant {
            name,
            asked,
            quota: 100,
            one: 40,
            peak: 80,
            exit: Some(0),
            said: Said { phases, held: 70, ..Said::default() },
        };
        let mut greedy = tenant("greedy", 1, Vec::new());
        greedy.said.apis = [("plain".to_owned(), (5, 3)), ("async".to_owned(), (2, 2))].into();
        let way = |name, got, p99| Way { name, got, steps: phase(p99), ..Way::default() };
        let ways = [("alone", 99, 4_000), ("with", 74, 9_000), ("without", 25, 27_000)];
        Facts {
            tenants: vec![
                tenant("chat", 1, vec![phase(7_000), phase(12_000)]),
                tenant("large", 2, vec![phase(7_000)]),
                greedy,
            ],
            ways: ways.map(|(name, got, p99)| way(name, [got, 100 - got], p99)).into(),
            ..Facts::default()
        }
    }

    #[test]
    fn each_broken_promise_fails_it_by_itself() {
        assert_eq!(judge(&kept(), false).text(), "OK: no quota was exceeded");
        type Break = fn(&mut Facts);
        let cases: [(&str, Break); 14] = [
            ("chat exceeded its quota: the driver showed 1 bytes", |f| f.tenants[0].peak = 101),
            ("chat never held", |f| f.tenants[0].peak = 0),
            ("chat was harmed: 2 requests found no memory", |f| {
                f.tenants[0].said.phases[1].out_of_memory = 2;
            }),
            ("1 requests failed", |f| f.tenants[0].said.phases[0].errors = 1),
            ("read wrong data", |f| f.tenants[1].said.phases[0].corrupted = 1),
            ("large held 40 B", |f| f.tenants[1].said.held = 40),
            ("chat ended with exit code 2", |f| f.tenants[0].exit = Some(2)),
            ("greedy did not end", |f| f.tenants[2].exit = None),
            ("never refused by the async API", |f| {
                f.tenants[2].said.apis.insert("async".to_owned(), (2, 0));
            }),
            ("greedy never tried", |f| f.tenants[2].said.apis.clear()),
            ("the p99 of chat beside others", |f| f.tenants[0].said.phases[1] = phase(43_000)),
            // What the demo once printed, and called OK.
            ("38.5 ms against 27.0 ms", |f| f.ways[1].steps = phase(38_500)),
            ("answer got 26 %", |f| f.ways[1].got[0] = 26),
            ("chat ended with exit code -1", |f| f.tenants[0].exit = Some(-1)),
        ];
        for (says, break_it) in cases {
            let mut facts = kept();
            break_it(&mut facts);
            let Verdict { failures, .. } = judge(&facts, false);
            assert!(failures.len() == 1 && failures[0].contains(says), "{says}: {failures:?}");
        }
    }

    #[test]
    fn chance_a_busy_machine_and_a_real_gpu_are_not_judged() {
        let mut facts = kept();
        facts.ways[1].steps = phase(28_000);
        let verdict = judge(&facts, false);
        assert!(
            verdict.failures.is_empty() && verdict.open[0].contains("--seconds"),
            "{verdict:?}"
        );
        facts.ways[1] = Way { steps: phase(38_500), got: [26, 74], ..facts.ways[1].clone() };
        assert_eq!(judge(&facts, false).failures.len(), 2);
        assert!(judge(&facts, true).failures.is_empty());
        facts.late_us[1] = CALM_US + 1;
        assert!(judge(&facts, false).failures.is_empty());
        // Memory is.
        facts.tenants[0].peak = 101;
        assert_eq!(judge(&facts, true).failures.len(), 1);
    }

    #[test]
    fn what_processes_say_adds_up_and_the_last_word_counts() {
        let mut text = "hello\n[1]\n".to_owned();
        for pid in [7, 8] {
            for refused in [1, 3] {
                text += &format!(
                    "{{\"event\":\"full\",\"pid\":{pid},\"held\":100,\"apis\":{{\"plain\":{{\"attempts\":5,\"refused\":{refused}}}}}}}\n"
                );
            }
        }
        text += "{\"event\":\"phase\",\"pid\":7,\"requests\":10,\"p99_us\":30,\"seconds\":1.5}\n";
        let said = Said::read(&text);
        assert_eq!((said.held, said.ready, said.tries()), (200, 4, (10, 6)));
        assert_eq!((said.phases.len(), said.total().requests), (1, 10));
    }

    #[test]
    fn a_peak_is_what_two_looks_in_a_row_agree_on() {
        let mut seen = Seen::default();
        for bytes in [10, 50, 20, 30, 30, 0] {
            seen.take(Look { bytes: [(7, bytes)].into(), ..Look::default() });
        }
        assert_eq!((seen.peak(7), seen.peak(8)), (30, 0));
    }

    #[test]
    fn one_look_of_a_hundred_may_be_later() {
        let mut seen = Seen { late_us: (1..=100).rev().collect(), ..Seen::default() };
        assert_eq!((seen.late_us(), seen.late_us()), (99, 0));
    }
}
