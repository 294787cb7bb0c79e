//! The plugin is replaced and killed while pods come and go.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tessera_harness::Rng;

use super::delivery::check_fill;
use crate::deploy::{NAMESPACE, REPLICAS, SHARE_BYTES};
use crate::invariants::{self, Invariants, Refusals};
use crate::number_of;
use crate::pods::{self, Container, Restart};
use crate::suite::Suite;
use crate::wait::{self, Look};

/// `maxUnavailable: 1`, no surge: for some seconds there is no plugin. Pods that come meanwhile wait,
/// but for those that were bound to the node already.
pub fn rolling_update_while_pods_come_and_run(suite: &Suite<'_>) -> Result<()> {
    let watched = Invariants::watch(suite)?;
    // What the cases after this one need anyway is as good an update as any.
    suite.plugin.begin_supervision()?;
    let main = [Container::greedy_once(1, &SHARE_BYTES.to_string())];
    for n in 0..12 {
        let pod = pods::manifest(&format!("coming-{n}"), Restart::Never, &[], &main);
        suite.kubectl.create_all(vec![pod])?;
        thread::sleep(Duration::from_millis(700));
    }
    suite.plugin.wait_for_roll_out()?;
    suite.plugin.wait_for_replicas(REPLICAS)?;
    let pods = wait_until_over(suite, "coming-", 12)?;
    let mut succeeded = 0;
    for pod in &pods {
        let status = &pod["status"];
        if status["phase"] == "Succeeded" {
            check_fill(filled(pod)?, SHARE_BYTES)?;
            succeeded += 1;
        } else {
            ensure!(status["reason"] == "UnexpectedAdmissionError", "{status}");
        }
    }
    let report = watched.finish(Refusals::WhileReplaced)?;
    println!("     {succeeded} of {} pods ran; refused: {:?}", pods.len(), report.refusals);
    // Those bound in the seconds without a plugin, and no more.
    ensure!(succeeded * 2 > pods.len(), "only {succeeded} of {} ran", pods.len());
    Ok(())
}

/// Waits until all pods whose names begin so are over.
pub fn wait_until_over(suite: &Suite<'_>, prefix: &str, count: usize) -> Result<Vec<Value>> {
    wait::until(&format!("{count} pods are over"), wait::LIMIT, || {
        let pods = of(suite, prefix)?;
        let over = pods.iter().filter(|pod| pods::is_over(&pod["status"])).count();
        let seen = format!("{over} of {}", pods.len());
        Ok(Look::found(Some(pods).filter(|_| over == count), seen))
    })
}

/// The pods whose names begin so.
fn of(suite: &Suite<'_>, prefix: &str) -> Result<Vec<Value>> {
    let mut pods = suite.kubectl.items(&["pods", "-n", NAMESPACE])?;
    pods.retain(|pod| {
        pod["metadata"]["name"].as_str().is_some_and(|name| name.starts_with(prefix))
    });
    Ok(pods)
}

/// What a pod that filled its quota wrote as its last word.
pub fn filled(pod: &Value) -> Result<u64> {
    let last = &pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"];
    pods::held(last.as_str().unwrap_or_default(), "full").with_context(|| pod["status"].to_string())
}

// The plugin killed at any moment while pods come and go, and what is left in the end.

/// Pods in all; `TESSERA_E2E_PODS`. Each kind of moment comes some four times.
const PODS: usize = 40;
/// Not over at a time: some wait for a share.
const AT_A_TIME: usize = 10;

/// When the plugin is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    /// After so many milliseconds.
    After(u64),
    /// When its ledger changes: while it commits, or before the pages.
    Commit,
    /// When a directory changes: between the pages and the answer.
    Pages,
}

impl Moment {
    /// Each kind once, in any order.
    fn round(random: &mut Rng) -> [Self; 3] {
        let mut round = [Moment::Commit, Moment::Pages, Moment::After(random.u64(..1500))];
        random.shuffle(&mut round);
        round
    }

    /// Waits for the moment, some seconds at most, and kills. Prints whether it came.
    fn script(self) -> String {
        // A wait without another process: `read` from a pipe that nobody writes to.
        let wait = "exec {pipe}<> <(:); tick() { read -rt 0.001 -u $pipe || true; }; i=0; came=no";
        let until = |condition: &str| {
            format!(
                "while [ $((i++)) -lt 4000 ]; do {condition} && {{ came=yes; break; }}; tick; done"
            )
        };
        let moment = match self {
            Moment::After(ms) => format!("sleep {}.{:03}; came=yes", ms / 1000, ms % 1000),
            Moment::Commit => {
                format!("touch $sim/.now; {}", until("[ $state/ledger.redb -nt $sim/.now ]"))
            }
            // The directory is there from pods before; new files come into it.
            Moment::Pages => format!(
                "touch $sim/.now; newer() {{ local d; for d in $pages/*; do [ $d -nt $sim/.now ] && \
                 return; done; return 1; }}; {}",
                until("newer")
            ),
        };
        format!(
            "p=$(serving); {wait}; {moment}; [ -n \"$p\" ] && kill -9 $p; rm -f $sim/.now; echo $came"
        )
    }
}

/// Every pod that is admitted has exactly its quota; those that are not were asked for while there was
/// no plugin. `TESSERA_E2E_SEED` repeats a run, as far as a machine can be repeated.
pub fn plugin_is_killed_at_random_moments_of_pod_churn(suite: &Suite<'_>) -> Result<()> {
    let seed = crate::seed()?;
    let pods = usize::try_from(number_of("TESSERA_E2E_PODS", PODS as u64)?)?;
    println!("     TESSERA_E2E_SEED={seed}");
    suite.plugin.supervise()?;
    let watched = Invariants::watch(suite)?;
    let done = AtomicBool::new(false);
    let (churned, kills) = thread::scope(|scope| {
        let killer = scope.spawn(|| kill(suite, seed, &done));
        let churned = churn(suite, pods);
        done.store(true, Ordering::Relaxed);
        (churned, killer.join())
    });
    let kills = match kills {
        Ok(kills) => kills?,
        Err(_) => bail!("the killer panicked"),
    };
    let succeeded = churned?;
    let report = watched.finish(Refusals::WhenKilled)?;
    let mut causes: BTreeMap<&str, usize> = BTreeMap::new();
    for refusal in &report.refusals {
        let end = refusal.rsplit("desc = ").next().unwrap_or_default();
        *causes.entry(end.split(". Requested").next().unwrap_or(end)).or_default() += 1;
    }
    println!("     {succeeded} of {pods} pods ran; killed {kills:?}; refused {causes:?}");
    println!("     {} looks at what is sold", report.samples);
    ensure!(succeeded + report.refusals.len() == pods, "{succeeded} + {causes:?} of {pods}");
    ensure!(succeeded * 3 > pods, "hardly any pod ran");
    let within = |moment: &str| kills.get(moment).copied().unwrap_or(0);
    ensure!(within("commit") > 0 && within("pages") > 0, "no Allocate was interrupted: {kills:?}");
    Ok(())
}

/// Kills until `done`; how often at which moment.
fn kill(suite: &Suite<'_>, seed: u64, done: &AtomicBool) -> Result<BTreeMap<&'static str, usize>> {
    let mut random = Rng::with_seed(seed);
    let mut kills = BTreeMap::new();
    let mut round = Vec::new();
    while !done.load(Ordering::Relaxed) {
        let moment = match round.pop() {
            Some(moment) => moment,
            None => {
                round.extend(Moment::round(&mut random));
                continue;
            }
        };
        let came = suite.host(&moment.script())?;
        let name = match (moment, came.trim()) {
            (Moment::After(_), _) => "at random",
            (Moment::Commit, "yes") => "commit",
            (Moment::Pages, "yes") => "pages",
            _ => "in vain",
        };
        *kills.entry(name).or_default() += 1;
        // Long enough that pods get in between, too short for the node to settle.
        thread::sleep(Duration::from_millis(500 + random.u64(..2500)));
    }
    Ok(kills)
}

/// Lets `pods` pods come and go; how many of them had their quota.
fn churn(suite: &Suite<'_>, pods: usize) -> Result<usize> {
    let main = [Container::greedy_once(1, &SHARE_BYTES.to_string())];
    let (mut created, mut succeeded) = (0, 0);
    let mut changed = Instant::now();
    loop {
        let all = of(suite, "churn-")?;
        let is_over = |pod: &&Value| pods::is_over(&pod["status"]);
        let over: Vec<&Value> = all.iter().filter(is_over).collect();
        let open = all.len() - over.len();
        if over.len() == pods {
            for pod in over {
                if pod["status"]["phase"] == "Succeeded" {
                    check_fill(filled(pod)?, SHARE_BYTES)?;
                    succeeded += 1;
                } else if pod["status"]["reason"] != "UnexpectedAdmissionError" {
                    bail!("a pod failed: {}", pod["status"]);
                }
            }
            return Ok(succeeded);
        }
        let more = AT_A_TIME.saturating_sub(open).min(pods - created);
        if more > 0 {
            changed = Instant::now();
            let new = (created..created + more)
                .map(|n| pods::manifest(&format!("churn-{n}"), Restart::Never, &[], &main));
            suite.kubectl.create_all(new.collect())?;
            created += more;
        }
        ensure!(changed.elapsed() < wait::LIMIT, "{open} pods do not end");
        ensure!(!wait::interrupted(), "interrupted");
        thread::sleep(Duration::from_millis(400));
    }
}

/// The last case: after all that went before, and its pods' end, nothing is left.
pub fn nothing_is_left_behind(suite: &Suite<'_>) -> Result<()> {
    suite.kubectl.delete_pods(NAMESPACE)?;
    invariants::nothing_is_left(suite)
}
